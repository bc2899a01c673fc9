"""Run in a process of its own by test_one_room_id.py: what our manager makes of a room id that two requests use.

SGLang's own classes with our hooks, but no server: decode's messages as its receiver sends them, a chunk through
SGLang's queue, and the two calls that SGLang's worker makes for it. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

ROOM, SESSION, PAGES = 7, "127.0.0.1:15001", 5


def main() -> dict[str, Any]:
    """Every case, by name: codes of KV and of the first token, prompts that were sent, failures by cause."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from array import array

    import numpy as np
    import torch
    from decode_process import counted
    from prometheus_client import CollectorRegistry
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.common.utils import FastQueue
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.observability.trace import TraceNullContext
    from sglang.srt.sampling.sampling_params import SamplingParams

    from spectrumkv_sglang import plugin
    from spectrumkv_sglang.observability.metrics import TransferMetrics
    from spectrumkv_sglang.transfer.handshake import RegistrationSocket
    from spectrumkv_sglang.transfer.manager import SpectrumKVManager, SpectrumKVReceiver, SpectrumKVSender, _ChunkTap
    from spectrumkv_sglang.transfer.outgoing_request import ChunkOrigin, OutgoingRequest
    from spectrumkv_sglang.transfer.request_identity import encode_prompt
    from spectrumkv_sglang.tuning.request_limits import read_limits

    pages = np.arange(PAGES, dtype=np.int32)

    first, second = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    carried: list[OutgoingRequest] = []  # by the chunks that were sent

    def server(*adapters: LoRARef) -> Any:
        """A scheduler, as far as it tells of adapters."""
        manager = SimpleNamespace(lora_refs={adapter.lora_id: adapter for adapter in adapters})
        return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager)))

    def marked(kind: type, token_ids: list[int], scheduler: Any = None, **fields: Any) -> Any:
        transfer = kind.__new__(kind)
        plugin._mark(transfer, SimpleNamespace(origin_input_ids=token_ids, output_ids=[], **fields), scheduler)
        return transfer

    def adapted(kind: type, adapter: str | None) -> Any:
        """Of ``first`` under an adapter that each server has loaded itself, under a random id."""
        refs = {name: LoRARef(lora_name=name, lora_path="/adapters") for name in ("law", "verse")}
        lora_id = refs[adapter].lora_id if adapter is not None else None
        return marked(kind, first, server(*refs.values()), lora_id=lora_id)

    def cached_for(adapter: str | None, other: str | None) -> list[int]:
        """Pool slots that SGLang's prefix cache gives a request of ``other`` after one of ``adapter``, whose
        importance and KV lie in slots 0 to 4."""
        cache = RadixCache.create_simulated()

        def key(lora_id: str | None) -> RadixKey:
            request = Req("r", "", array("q", first), SamplingParams(), lora_id=lora_id)
            return RadixKey(request.origin_input_ids, extra_key=request.extra_key)

        cache.insert(InsertParams(key=key(adapter), value=torch.arange(len(first))))
        return list(cache.match_prefix(MatchPrefixParams(key=key(other))).device_indices.tolist())

    def waiting(receiver: Any, *, plain: bool = False) -> Any:
        """Decode's pages as prefill learns of them."""
        sent: list[list[bytes]] = []
        socket = RegistrationSocket(
            SimpleNamespace(send_multipart=sent.append),
            b"",
            None if plain else lambda room: encode_prompt(receiver.spectrumkv_prompt),
        )
        own = [
            str(ROOM).encode(),
            b"127.0.0.1",
            b"20001",
            SESSION.encode(),
            pages.tobytes(),
            b"3",
            b"",
            b"1",
            b"0",
            b"",
        ]
        socket.send_multipart(own)
        info = TransferInfo.from_zmq(sent[0])
        assert (info.room, info.dst_kv_indices.tolist(), info.dst_aux_index) == (ROOM, pages.tolist(), 3)
        return info

    def worked(sender: Any, info: Any, later: Any = None) -> dict[str, Any]:
        """What comes of the chunk of ``sender`` when decode's pages are ``info``, or ``later`` once it is queued."""
        registry, sent = CollectorRegistry(), []

        def send(chunk: Any, send_natively: Any, only: Any) -> tuple[int, bool]:
            sent.append(chunk.prompt)
            carried.append(chunk.request)
            return 0, False

        manager = SpectrumKVManager.__new__(SpectrumKVManager)
        raw = FastQueue()
        vars(manager).update(
            current=threading.local(),
            sending=ChunkOrigin(),
            early_send_event=None,
            scheduler_overlaps=lambda: False,
            disaggregation_mode=DisaggregationMode.PREFILL,
            request_status={ROOM: KVPoll.WaitingForInput},
            transfer_infos={ROOM: {SESSION: info}},
            transfer_queues=[_ChunkTap(raw, manager)],
            decode_kv_args_table={},
            kv_args=SimpleNamespace(kv_item_lens=[64], aux_data_ptrs=[], aux_item_lens=[]),
            enable_custom_mem_pool=False,
            prefill_rank=SimpleNamespace(send=send),
            session_lock=threading.Lock(),
            failed_sessions=set(),
            session_failures=defaultdict(int),
            _metrics=TransferMetrics("prefill", 0, registry=registry),
        )
        vars(sender).update(
            kv_mgr=manager,
            bootstrap_room=ROOM,
            curr_idx=0,
            num_kv_indices=PAGES,
            aux_index=0,
            trace_ctx=TraceNullContext(),
            _record_transfer_indices=lambda *args: None,
            _prepare_send_indices=lambda indices, state=None: (indices, slice(0, PAGES), True, False),
        )
        sender.send(pages)
        if later is not None:
            manager.transfer_infos[ROOM][SESSION] = later
        chunk = _ChunkTap(raw, manager).get()
        assert chunk.room == ROOM
        found = manager.transfer_infos[ROOM][SESSION]
        kv = manager.send_kvcache(SESSION, chunk.prefill_kv_indices, [], found.dst_kv_indices, None)
        return {
            "kv": kv,
            "first token": manager.send_aux(found, 0, []),
            "prompts": sent,
            "failures": counted(registry),
            "banned": sorted(manager.failed_sessions),
        }

    def limits_of_two() -> list[float]:
        """`max_kl` with which the chunks of two requests are sent that wait under one room id."""
        arrive = SimpleNamespace(
            kv_manager=SimpleNamespace(expect_request=lambda room, asked: OutgoingRequest(read_limits(asked))),
            scheduler=None,
        )

        def create_sender(queue: Any, req: Any) -> None:
            req.disagg_kv_sender = SpectrumKVSender.__new__(SpectrumKVSender)

        requests = [
            SimpleNamespace(
                bootstrap_room=ROOM,
                origin_input_ids=first,
                output_ids=[],
                sampling_params=SimpleNamespace(custom_params={"spectrumkv": {"max_kl": most}}),
            )
            for most in (0.0, 0.5)
        ]
        for request in requests:
            plugin._expect_request(create_sender, arrive, request)
        carried.clear()
        for request in requests:
            worked(request.disagg_kv_sender, waiting(own))
        return [request.limits.max_kl for request in carried]

    def forgotten(kind: type) -> list[int]:
        """What the poll of one says whose room the other request of the same id has ended, and then again."""
        transfer, reasons = kind.__new__(kind), {}
        manager = SimpleNamespace(request_status={}, record_failure=reasons.__setitem__, close_room=reasons.get)
        vars(transfer).update(kv_mgr=manager, bootstrap_room=ROOM, conclude_state=None)
        polls = [int(transfer.poll()), int(transfer.poll())]
        assert list(reasons) == [ROOM]
        return [*polls, int(KVPoll.Failed)]

    own, other = marked(SpectrumKVReceiver, first), marked(SpectrumKVReceiver, second)
    return {
        "own": worked(marked(SpectrumKVSender, first), waiting(own)),
        "other's": worked(marked(SpectrumKVSender, first), waiting(other)),
        "other's, once it is queued": worked(marked(SpectrumKVSender, first), waiting(own), waiting(other)),
        "plain decode": worked(marked(SpectrumKVSender, first), waiting(own, plain=True)),
        "same adapter": worked(adapted(SpectrumKVSender, "law"), waiting(adapted(SpectrumKVReceiver, "law"))),
        "other adapter": worked(adapted(SpectrumKVSender, "law"), waiting(adapted(SpectrumKVReceiver, "verse"))),
        "base model": worked(adapted(SpectrumKVSender, None), waiting(adapted(SpectrumKVReceiver, "law"))),
        "unknown adapter": worked(
            marked(SpectrumKVSender, first, server(), lora_id="0"), waiting(adapted(SpectrumKVReceiver, "law"))
        ),
        "limits": limits_of_two(),
        "cached": [cached_for(*names) for names in (("law", "law"), ("law", "verse"), (None, "law"), ("law", None))],
        "forgotten": [forgotten(SpectrumKVSender), forgotten(SpectrumKVReceiver)],
        "images": worked(marked(SpectrumKVSender, first, multimodal_inputs=object()), waiting(other)),
    }


if __name__ == "__main__":
    os.environ["SPECTRUMKV_ACTIVE"] = "spectrumkv"
    # The plugin takes this process for a scheduler, which has a parent.
    multiprocessing.parent_process = multiprocessing.current_process  # type: ignore[assignment]
    print("RESULT " + json.dumps(main()))
