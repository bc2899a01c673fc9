"""Observes forwards with the GPU kernels, in the forward's stream and without waiting on the host.

A layer costs the scheduler's thread one copy of its sampled queries. Both passes run over many layers at once, when the
copies' memory is full or the forward ends: keys stay in the pool, so nothing else has to be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from spectrumkv_sglang.importance.forward_layout import KernelWork, ObservedRequests, kernel_work
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.kernels.importance_format import LAYER_COLUMNS, NO_WINDOW

QUERY_BYTES = 32 * 1024 * 1024
"""Most bytes of copied queries; one layer's may exceed it."""


class KernelObservation:
    """The kernels on one rank's pool. Not thread-safe; all forwards belong on one stream, or on ordered ones.

    Args:
        k_buffers: the pool's key tensors, one a layer, [pool slots, kv heads, head dim], accepted by ``why_not``.
        req_to_token: int32 [requests, positions] -> pool slot.
        scores: where the scores are kept.
    """

    def __init__(self, k_buffers: Sequence[torch.Tensor], req_to_token: torch.Tensor, scores: SlotScores) -> None:
        from spectrumkv_sglang.kernels.triton_importance import UNIT_BYTES

        self.keys, self.req_to_token, self.scores = k_buffers[0], req_to_token, scores
        self.device = self.keys.device
        self.layers = len(k_buffers)
        self._addresses = np.zeros((self.layers, LAYER_COLUMNS), dtype=np.int64)
        self._addresses[:, 0] = [(buffer.data_ptr() - self.keys.data_ptr()) // UNIT_BYTES for buffer in k_buffers]
        self._factors = np.zeros((self.layers, LAYER_COLUMNS), dtype=np.float32)
        self._settings: list[tuple[float, int, float] | None] = [None] * self.layers
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self.capped = False
        self._free: list[_Workspace] = []
        self._uploads: list[_Upload] = []
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def why_not(k_buffers: Sequence[torch.Tensor]) -> str | None:
        """Why the kernels cannot take these buffers, or None if they can."""
        try:
            from spectrumkv_sglang.kernels.triton_importance import why_not
        except ImportError as error:
            return f"Triton, which cannot be imported ({error})"
        return why_not(list(k_buffers))

    def begin(
        self, requests: ObservedRequests, pool_indices: torch.Tensor, q_heads: int, dtype: torch.dtype
    ) -> KernelForward:
        """A new forward: list its keys' slots and forget the scores of those that it writes.

        Args:
            pool_indices: [batch] on the device, each batch row's row of ``req_to_token``.
            q_heads: query heads, a multiple of the KV heads.
            dtype: of the queries.
        """
        from spectrumkv_sglang.kernels.triton_importance import shapes_for
        from spectrumkv_sglang.kernels.triton_importance_slots import begin_forward

        kv_heads, dim = self.keys.shape[1:]
        if q_heads % kv_heads:
            raise ValueError(f"expected query heads to be a multiple of {kv_heads} KV heads, got {q_heads}")
        self._follow_stream()
        shapes = shapes_for(self.device, self.keys.dtype, dim)
        work = kernel_work(
            requests, q_heads // kv_heads, shapes.log_sums.rows, shapes.split_keys, shapes.column_sums.keys
        )
        layer_bytes = requests.queries * q_heads * dim * dtype.itemsize
        layers = max(1, min(self.layers, QUERY_BYTES // max(1, layer_bytes)))
        memory = self._free.pop() if self._free else _Workspace(self.device)
        memory.fit(work, layers * kv_heads * work.log_sums)
        self._upload(work.words, memory.words)
        begin_forward(
            memory.words,
            work.requests_at,
            len(requests),
            work.most_keys,
            memory.slots,
            pool_indices,
            self.req_to_token,
            self.scores.tensors,
        )
        queries = memory.queries_of((layers, requests.queries, q_heads * dim), dtype)
        return KernelForward(self, requests, work, memory, queries)

    def release(self, memory: _Workspace) -> None:
        """Take back the memory of a forward whose launches are all queued."""
        self._free.append(memory)

    def layer_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses and windows, scaling and caps of the layers, on the device."""
        if self._tables is None:
            tables = torch.from_numpy(self._addresses.copy()), torch.from_numpy(self._factors.copy())
            if self.device.type == "cuda":
                with torch.inference_mode(False):
                    tables = tables[0].pin_memory(), tables[1].pin_memory()
                    tables = (
                        tables[0].to(self.device, non_blocking=True),
                        tables[1].to(self.device, non_blocking=True),
                    )
            self._tables = tables
        return self._tables

    def learn(self, layer: int, scaling: float, window: int, cap: float) -> None:
        """Remember a layer's settings; they hardly ever change after the first forward."""
        settings = scaling, window, cap
        if self._settings[layer] != settings:
            self._settings[layer] = settings
            self._addresses[layer, 1] = window
            self._factors[layer] = scaling, cap
            self.capped = self.capped or cap > 0.0
            self._tables = None

    def warm_up(self) -> None:
        """Compile the kernels, for layers without logit cap, on memory of their own."""
        none = np.zeros(1, dtype=np.int64)
        request = ObservedRequests(none, none, none + 1, none, np.array([0, 1]), none, none)
        heads, dim = self.keys.shape[1:]
        with torch.inference_mode(False):
            nowhere = KernelObservation([self.keys], self.req_to_token.new_zeros((1, 16)), SlotScores(1, self.device))
            forward = nowhere.begin(
                request, torch.zeros(1, dtype=torch.int64, device=self.device), heads, self.keys.dtype
            )
            forward.observe(
                0, torch.zeros((1, heads * dim), dtype=self.keys.dtype, device=self.device), 1.0, None, None
            )
            forward.join_splits()
            forward.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _upload(self, words: np.ndarray, to: torch.Tensor) -> None:
        if self.device.type != "cuda":
            to[: words.size].copy_(torch.from_numpy(words))
            return
        upload = next((upload for upload in self._uploads if upload.fits(words.size) and upload.done()), None)
        if upload is None:
            self._uploads = [old for old in self._uploads if not old.done()]
            upload = _Upload(words.size)
            self._uploads.append(upload)
        upload.send(words, to)

    def _follow_stream(self) -> None:
        """Order this forward behind the earlier ones where SGLang changes its stream."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
            self._free.clear()  # its memory belongs to the other stream's allocations
        self._stream = stream


class KernelForward:
    """One forward under observation."""

    def __init__(
        self,
        kernels: KernelObservation,
        requests: ObservedRequests,
        work: KernelWork,
        memory: _Workspace,
        queries: torch.Tensor,
    ) -> None:
        from spectrumkv_sglang.kernels.triton_importance import WorkTables

        self._kernels, self._requests, self._work, self._memory = kernels, requests, work, memory
        self._queries = queries
        self._rows = memory.words[: requests.queries]
        self._first, self._pending = 0, 0
        self._windows: Counter[int] = Counter()
        self._tables = WorkTables(
            words=memory.words,
            slots=memory.slots,
            positions_at=work.positions_at,
            log_items_at=work.log_items_at,
            log_items=work.log_items,
            log_tiles=work.log_tiles,
            sum_items_at=work.sum_items_at,
            sum_items=work.sum_items,
            log_sums=work.log_sums,
            split=work.split,
        )

    def observe(
        self, layer: int, q: torch.Tensor, scaling: float, sliding_window: int | None, logit_cap: float | None
    ) -> None:
        """Keep the sampled rows of ``q``, [tokens, q heads * head dim] or [tokens, q heads, head dim].

        Other arguments are as `observed_attention` takes them.
        """
        window = NO_WINDOW if sliding_window is None or sliding_window < 0 else min(sliding_window, NO_WINDOW)
        if self._pending == len(self._queries) or (self._pending and layer != self._first + self._pending):
            self._flush()
        if not self._pending:
            self._first = layer
        self._kernels.learn(layer, scaling, window, logit_cap or 0.0)
        flat = q if q.dim() == 2 else q.flatten(1)
        torch.index_select(flat, 0, self._rows, out=self._queries[self._pending])
        self._pending += 1
        self._windows[window] += 1

    def finish(self) -> None:
        """The last layer has been observed: add everything up and publish the scores."""
        from spectrumkv_sglang.kernels.triton_importance_slots import count_observations, publish_scores

        self._flush()
        work, scores = self._work, self._kernels.scores
        of_all = (self._memory.words, work.requests_at, len(self._requests), work.most_keys, self._memory.slots)
        for window, layers in sorted(self._windows.items()):
            count_observations(*of_all, work.positions_at, scores.could_attend, window, layers)
        publish_scores(*of_all, scores.tensors)
        self.close()

    def close(self) -> None:
        """Give the memory back, finished or not."""
        self._pending = 0
        self._kernels.release(self._memory)

    def join_splits(self) -> None:
        """Take the next passes for ones with several key splits: compiles what long prompts need."""
        self._tables = self._tables._replace(split=True)

    def _flush(self) -> None:
        from spectrumkv_sglang.kernels.triton_importance import LayerBatch, add_received, shapes_for

        if not self._pending:
            return
        kernels = self._kernels
        offsets, factors = kernels.layer_tables()
        batch = LayerBatch(self._queries[: self._pending], kernels.keys, offsets, factors, self._first, kernels.capped)
        shapes = shapes_for(kernels.device, kernels.keys.dtype, kernels.keys.shape[2])
        self._pending = 0
        add_received(
            batch, self._tables, self._memory.log_sums, kernels.scores.received, kernels.scores.could_attend, shapes
        )


class _Workspace:
    """Device memory of one forward at a time; grows, never shrinks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.words = self._new(0, torch.int32)
        self.slots = self._new(0, torch.int32)
        self.log_sums = self._new(0, torch.float32)
        self._queries = self._new(0, torch.uint8)

    def fit(self, work: KernelWork, log_sums: int) -> None:
        """Make room for the forward's tables, slots and log-sums."""
        self.words = self._grown(self.words, work.words.size)
        self.slots = self._grown(self.slots, work.total_keys)
        self.log_sums = self._grown(self.log_sums, log_sums)

    def queries_of(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Room for copied queries [layers, queries, q heads * head dim]."""
        size = int(np.prod(shape)) * dtype.itemsize
        self._queries = self._grown(self._queries, size)
        return self._queries[:size].view(dtype).view(shape)

    def _grown(self, memory: torch.Tensor, size: int) -> torch.Tensor:
        return memory if memory.numel() >= size else self._new(1 << (size - 1).bit_length(), memory.dtype)

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # used inside and outside of SGLang's inference mode
            return torch.empty(size, dtype=dtype, device=self._device)


class _Upload:
    """Pinned memory that carries one forward's tables at a time."""

    def __init__(self, words: int) -> None:
        with torch.inference_mode(False):
            self._pinned = torch.empty(1 << max(10, (words - 1).bit_length()), dtype=torch.int32, pin_memory=True)
        self._sent = torch.cuda.Event()

    def fits(self, words: int) -> bool:
        """Whether it has room for ``words``."""
        return self._pinned.numel() >= words

    def done(self) -> bool:
        """Whether the last copy has been made."""
        return self._sent.query()

    def send(self, words: np.ndarray, to: torch.Tensor) -> None:
        """Copy up in the current stream's order, without waiting."""
        self._pinned.numpy()[: words.size] = words
        to[: words.size].copy_(self._pinned[: words.size], non_blocking=True)
        self._sent.record(torch.cuda.current_stream(to.device))
