"""A quick measurement of packing and unpacking on this machine, by the code that serves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.sizing.errors import SizingError
from spectrumkv_sglang.sizing.speeds import ProfileSpeed, SpeedTable
from spectrumkv_sglang.sizing.transport import Transport

REPEATS = 3
MOST_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
"""Native KV that one measurement moves."""
LEAST_TOKENS = 128
MOST_TOKENS = {"cpu": 512, "cuda": 8192}


def measure_speeds(
    geometry: KVGeometry,
    policies: Sequence[tuple[str, float]],
    say: Callable[[str], None] = lambda line: None,
    transport: Transport = Transport.TCP,
) -> SpeedTable:
    """Median speeds of ``policies``, (profile, budget), on random KV of one rank's ``geometry``.

    Planning, packing with the checksum, and verified unpacking count; the device is the first GPU, or the CPU.
    ``transport`` says what a chunk costs beside that: no transfer is measured here.

    Raises:
        SizingError: the device cannot hold the KV.
    """
    import numpy as np
    import torch

    from spectrumkv_sglang.config import load_config
    from spectrumkv_sglang.loopback.in_place import InPlaceTransfer
    from spectrumkv_sglang.payload.kv_buffers import KVBuffers
    from spectrumkv_sglang.transfer.pool_view import PoolView

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = min(
        MOST_TOKENS[device.type], max(LEAST_TOKENS, MOST_BYTES[device.type] // geometry.native_bytes_per_token)
    )
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, geometry.dtype)

    def pool(dim: int) -> list[torch.Tensor]:
        shape = (tokens, geometry.kv_heads, dim)
        return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(geometry.layers)]

    try:
        view = PoolView(KVBuffers(pool(geometry.head_dim), pool(geometry.v_head_dim)), geometry, device, tokens)
    except torch.OutOfMemoryError as error:
        raise SizingError(f"--measure: no memory for {tokens} tokens of KV on {device}: {error}") from error
    pages = np.random.default_rng(0).permutation(tokens).astype(np.int64)
    base = load_config(None, {"SPECTRUMKV_SCORER": "random"})
    speeds: dict[str, ProfileSpeed] = {}
    for profile, budget in policies:
        transfer = InPlaceTransfer(view, base.with_policy(profile, budget), None)
        taken = []
        for repeat in range(REPEATS + 1):  # the first one compiles kernels
            transfer.pack(f"{profile}-{repeat}", pages, tokens)
            record = transfer.unpack(f"{profile}-{repeat}")
            taken.append((record.native_bytes / record.pack_seconds, record.native_bytes / record.unpack_seconds))
        pack, unpack = (statistics.median(column) for column in zip(*taken[1:], strict=True))
        speeds[profile] = ProfileSpeed(
            pack, unpack, chunk_seconds=transport.chunk_seconds, source=f"measured here ({device.type})"
        )
        say(f"{profile}: {pack / 1e9:.2f} GB/s packed, {unpack / 1e9:.2f} GB/s unpacked")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return SpeedTable(f"measured here on {name}: {tokens} tokens, median of {REPEATS}; {transport.why}", speeds)
