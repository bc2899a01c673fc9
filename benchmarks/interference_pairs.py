"""Pairs whose prefill and decode servers have a GPU each, and whose decode may use CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pairs import PairBench, PairOptions, Variant

from spectrumkv_sglang.launch.netns import Link
from spectrumkv_sglang.launch.servers import Role, ServerSpec, SGLangServer, device_flags

_DECODE_GRAPH_FLAGS = ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-max-bs-decode", "16")


@dataclass(frozen=True)
class Placement:
    """Where the servers run.

    Attributes:
        prefill_gpu: number of prefill's GPU; None leaves the choice to SGLang.
        decode_gpu: number of decode's.
        decode_graphs: decode replays CUDA graphs, SGLang's default, which this project's demo and tests switch off.
    """

    prefill_gpu: int | None = None
    decode_gpu: int | None = None
    decode_graphs: bool = False

    def applied(self, spec: ServerSpec) -> ServerSpec:
        """The same server at its place. A plain server goes where prefill is."""
        gpu = self.decode_gpu if spec.role is Role.DECODE else self.prefill_gpu
        if gpu is not None:
            spec = replace(spec, env={**spec.env, "CUDA_VISIBLE_DEVICES": str(gpu)})
        if self.decode_graphs and spec.role is Role.DECODE:
            flags = [flag for flag in device_flags(spec.device) if flag != "--disable-cuda-graph"]
            spec = replace(spec, own_flags=False, extra_args=(*flags, *_DECODE_GRAPH_FLAGS, *spec.extra_args))
        return spec


class PlacedPairs(PairBench):
    """Starts pairs as `PairBench` does, each server at its place."""

    def __init__(self, options: PairOptions, link: Link, placement: Placement) -> None:
        super().__init__(options, link)
        self._placement = placement

    def _server(self, role: Role, variant: Variant) -> SGLangServer:
        server = super()._server(role, variant)
        return SGLangServer(self._placement.applied(server.spec), server.name, log_dir=self.options.log_dir)
