"""nvCOMP's codecs on payloads in GPU memory: ratios, and speeds by CUDA events."""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lossless_outcome import Outcome
from lossless_payloads import Payload

WARM_UP, RUNS = 3, 21
MOST_SECONDS = 90.0
"""For one payload, the process' start included."""
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, MemoryError, BufferError)
"""What nvCOMP, pybind11 and torch raise. One codec's failure leaves the others' rows."""
VIEWS = {"|u1": torch.uint8, "|f1": torch.uint8, "<i2": torch.int16, "<f2": torch.float16}
"""How a payload is shown to nvCOMP for a data type: to it bfloat16 is a half like any other."""


@dataclass(frozen=True)
class GpuCodec:
    """One way to call nvCOMP.

    Attributes:
        name: of the column.
        algorithm: nvCOMP's name.
        data_type: array-protocol type that the codec takes the bytes for; None: it takes no such option.
        elements: of the payloads that it is for (`Payload.element`).
        options: others of `nvcomp.Codec`.
        policy: member of `nvcomp.ExecutionPolicy`; None leaves it at nvCOMP's own choice.
    """

    name: str
    algorithm: str
    data_type: str | None = None
    elements: tuple[str, ...] = ("byte", "half", "e4m3")
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None


CODECS = (
    GpuCodec("ANS", "ANS", "|u1"),
    GpuCodec("ANS, latency", "ANS", "|u1", policy="LATENCY"),
    GpuCodec("ANS, half", "ANS", "<f2", ("half",)),
    GpuCodec("ANS, half, latency", "ANS", "<f2", ("half",), policy="LATENCY"),
    GpuCodec("ANS, E4M3", "ANS", "|f1", ("e4m3",)),
    GpuCodec("Bitcomp", "Bitcomp", "|u1"),
    GpuCodec("Bitcomp, int16", "Bitcomp", "<i2", ("half",)),
    GpuCodec("Bitcomp, half", "Bitcomp", "<f2", ("half",)),
    GpuCodec("GDeflate, entropy only", "GDeflate", options={"algorithm_type": 0}),
    GpuCodec("LZ4", "LZ4", "|u1"),
    GpuCodec("Snappy", "Snappy"),
    GpuCodec("zstd", "Zstd"),
    GpuCodec("Cascaded", "Cascaded", "|u1"),
)
"""Those that are most wanted first: an error that loses the CUDA context ends the run."""


@dataclass(frozen=True)
class GpuRow:
    """What one codec did with one payload: an outcome, or the error in its place.

    ``reused_buffers``: whether the timed calls wrote into buffers made before them; otherwise nvCOMP made its own.
    """

    payload: str
    codec: str
    outcome: Outcome | None = None
    error: str | None = None
    reused_buffers: bool = True


def load_nvcomp() -> Any:
    """The module, or an end of the program that says what is missing."""
    if not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here")
    try:
        return importlib.import_module("nvidia.nvcomp")
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        sys.exit(
            f"--device cuda: nvCOMP cannot be imported ({error}); install it with\n"
            f"    pip install nvidia-nvcomp-cu{major}\n"
            f"or, without a network, from wheels of nvidia-nvcomp-cu{major} and nvidia-libnvcomp-cu{major} of one "
            "version: pip install --no-deps *.whl"
        )


def measure(payloads: Sequence[Payload], device: str) -> Iterator[GpuRow]:
    """Every payload by every codec that is for its kind of elements, codec by codec.

    Each codec has a process of its own, since an illegal access of one ends its process' CUDA context. What it did
    not come to is measured again by another process with buffers that nvCOMP makes itself.
    """
    for number, codec in enumerate(CODECS):
        left = [payload for payload in payloads if payload.element in codec.elements]
        failed: dict[str, GpuRow] = {}
        for reuse in (True, False):
            done: list[str] = []
            for row in _in_a_process(number, left, device, reuse):
                if row.outcome is None:
                    failed[row.payload] = row
                    continue
                done.append(row.payload)
                yield row
            left = [payload for payload in left if payload.name not in done]
            if not left:
                break
        for payload in left:
            yield failed.get(payload.name) or GpuRow(payload.name, codec.name, error="its process ended before it")


def _in_a_process(number: int, payloads: Sequence[Payload], device: str, reuse: bool) -> Iterator[GpuRow]:
    """Rows as a process of their own sends them, until it ends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, number, payloads, device, reuse))
    process.start()
    sender.close()
    try:
        while receiver.poll(MOST_SECONDS):
            yield receiver.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()


def _serve(sender: Any, number: int, payloads: Sequence[Payload], device: str, reuse: bool) -> None:
    nvcomp, codec = load_nvcomp(), CODECS[number]
    with torch.cuda.device(device):
        for payload in payloads:
            try:
                sender.send(_row(nvcomp, codec, payload, reuse))
            except FAILURES as error:
                text = str(error).splitlines()
                sender.send(
                    GpuRow(payload.name, codec.name, error=f"{type(error).__name__}: {text[0] if text else ''}")
                )
                if _context_lost() is not None:
                    return


def _row(nvcomp: Any, codec: GpuCodec, payload: Payload, reuse: bool) -> GpuRow:
    """All on the default stream, and every array that nvCOMP was shown is alive until the GPU is done with it."""
    data = torch.frombuffer(bytearray(payload.data), dtype=torch.uint8).cuda()
    elements = data.view(VIEWS[codec.data_type or "|u1"])
    torch.cuda.synchronize()
    options = dict(codec.options)
    if codec.data_type is not None:
        options["data_type"] = codec.data_type
    if codec.policy is not None:
        options["execution_policy"] = getattr(nvcomp.ExecutionPolicy, codec.policy)
    own = nvcomp.Codec(algorithm=codec.algorithm, **options)
    source = nvcomp.as_array(elements)
    packed = own.encode(source)
    torch.cuda.synchronize()
    packed_bytes = int(packed.buffer_size)
    decoded = own.decode(packed, data_type="|u1")
    torch.cuda.synchronize()
    if not torch.equal(torch.utils.dlpack.from_dlpack(decoded).view(torch.uint8).flatten(), data):
        raise ValueError("what it decompressed is not what it compressed")
    compress, reused = _seconds(_compressions(nvcomp, own, source), codec.name, reuse)
    out = torch.zeros_like(data)
    decompress, reused_out = _seconds(_decompressions(nvcomp, own, packed, out), codec.name, reuse)
    if reused_out and not torch.equal(out, data):
        raise ValueError("what it decompressed into a buffer that was there is not what it compressed")
    outcome = Outcome(len(data), packed_bytes, compress, decompress)
    return GpuRow(payload.name, codec.name, outcome, reused_buffers=reused and reused_out)


@dataclass(frozen=True)
class _Timed:
    """The same work twice: into buffers that are there, as a server would, and plainly."""

    prepared: Callable[[], Callable[[], object]]
    plain: Callable[[], object]


def _compressions(nvcomp: Any, own: Any, source: Any) -> _Timed:
    def prepared() -> Callable[[], object]:
        configuration = own.compression_config(source.buffer_size)
        buffer = torch.empty(own.get_max_comp_buffer_size(source), dtype=torch.uint8, device="cuda")
        out = nvcomp.as_array(buffer)
        return lambda: (buffer, own.encode(source, out=out, compression_config=configuration))

    return _Timed(prepared, lambda: own.encode(source))


def _decompressions(nvcomp: Any, own: Any, packed: Any, buffer: torch.Tensor) -> _Timed:
    def prepared() -> Callable[[], object]:
        configuration = own.decompression_config(packed)  # waits for the header, as decode's first call would
        out = nvcomp.as_array(buffer)
        return lambda: own.decode(packed, out=out, decompression_config=configuration)

    return _Timed(prepared, lambda: own.decode(packed))


def _seconds(timed: _Timed, name: str, reuse: bool) -> tuple[float, bool]:
    """Median of the GPU's time from call to end, and whether the buffers that were made before were used."""
    if not reuse:
        return _median(timed.plain), False
    try:
        return _median(timed.prepared()), True
    except FAILURES as error:
        print(f"{name}: into its own buffers instead: {type(error).__name__}: {error}", file=sys.stderr)
        return _median(timed.plain), False


def _median(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(WARM_UP + RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        kept = work()  # held until the GPU is done: freeing its memory is not part of it
        end.record()
        torch.cuda.synchronize()
        del kept
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken[WARM_UP:])


def _context_lost() -> str | None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return None
