"""How kernels see the elements of the KV pool, and whether they may write them."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_elements(pool_ptr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """The pool as elements of its own type; bfloat16 as int16, which Triton's interpreter can move."""
    if BFLOAT16:
        return pool_ptr.to(tl.pointer_type(tl.int16))
    elif FLOAT16:
        return pool_ptr.to(tl.pointer_type(tl.float16))
    else:
        return pool_ptr.to(tl.pointer_type(tl.float32))


@triton.jit
def writable_rows(verdict_ptr, rows):
    """``rows`` if the payload is the announced one, else 0.

    The verdict: checksum as counted, checksum as announced, words of the prologue that differ.
    """
    differences = (tl.load(verdict_ptr) ^ tl.load(verdict_ptr + 1)) | tl.load(verdict_ptr + 2)
    return tl.where(differences == 0, rows, 0)
