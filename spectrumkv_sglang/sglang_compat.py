"""Everything that depends on how a given SGLang version looks. Nothing else tests a version.

Supported: SGLang 0.5.16 to 0.5.23. What is needed of SGLang is listed as extension points; a server that chooses
this backend does not start when one of them is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrumkv_sglang.errors import SpectrumKVError

if TYPE_CHECKING:
    from spectrumkv_sglang.observability.transfer_spans import Span

OLDEST_SGLANG = (0, 5, 16)
NEWEST_SGLANG = (0, 5, 23)

BACKEND = "spectrumkv"
BACKEND_TCP = "spectrumkv_tcp"
ACTIVE_VARIABLE = "SPECTRUMKV_ACTIVE"
CONFIG_VARIABLE = "SPECTRUMKV_CONFIG"
STRICT_VARIABLE = "SPECTRUMKV_STRICT"
LOOPBACK_VARIABLE = "SPECTRUMKV_LOOPBACK"

PD_HOOK = "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation"
CLI_HOOK = "sglang.srt.server_args.ServerArgs.add_cli_args"
KV_CLASS_HOOK = "sglang.srt.disaggregation.utils.get_kv_class"
REGISTRATION_HOOK = "sglang.srt.disaggregation.mooncake.conn.KVArgsRegisterInfo.from_zmq"
METADATA_HOOK = "sglang.srt.disaggregation.mooncake.conn.TransferInfo.from_zmq"
PREFILL_QUEUE_HOOK = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager"
REQUEST_HOOK = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
DECODE_QUEUE_HOOK = "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager"
RECEIVER_HOOK = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
ATTENTION_HOOK = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward"
RUN_BATCH_HOOK = "sglang.srt.managers.scheduler.Scheduler.run_batch"
LOGITS_HOOK = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"

_CONN = "sglang.srt.disaggregation.mooncake.conn"


@dataclass(frozen=True)
class ExtensionPoint:
    """One thing that the backend needs of SGLang. ``detail`` says what was found or what is missing."""

    name: str
    needed_for: str
    found: bool
    detail: str


_REQUIRED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # dotted name, parameters that must be accepted, what it is needed for
    (PD_HOOK, ("server_args",), "accept the backend's name and hand it to SGLang as mooncake"),
    (CLI_HOOK, ("parser",), "the --spectrumkv-config flag"),
    (KV_CLASS_HOOK, ("transfer_backend", "class_type"), "return this backend's manager, sender and receiver"),
    (REGISTRATION_HOOK, ("msg",), "read decode's handshake on prefill"),
    (METADATA_HOOK, ("msg",), "know on prefill whose KV decode's pages wait for"),
    (PREFILL_QUEUE_HOOK, (), "learn prefill's KV pool"),
    (REQUEST_HOOK, ("req",), "know what a request asks of the controller, and its prompt"),
    (DECODE_QUEUE_HOOK, (), "learn decode's KV pool"),
    (RECEIVER_HOOK, ("req",), "know on decode whose KV a room waits for"),
    (ATTENTION_HOOK, ("q", "layer", "forward_batch"), "observe which tokens are attended to"),
    (
        f"{_CONN}.MooncakeKVManager.send_kvcache",
        ("mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices", "executor"),
        "send a chunk as a tiered payload",
    ),
    (f"{_CONN}.MooncakeKVManager.send_kvcache_slice", (), "send a chunk between unequal TP sizes as a tiered payload"),
    (
        f"{_CONN}.MooncakeKVManager._do_staging_transfer",
        ("staging_strategy", "kv_chunk", "req"),
        "count what SGLang's staging buffer takes",
    ),
    (f"{_CONN}.MooncakeKVManager.transfer_worker", ("queue",), "know which room a chunk belongs to"),
    (
        f"{_CONN}.MooncakeKVManager.add_transfer_request",
        ("bootstrap_room", "kv_indices", "index_slice"),
        "know which request a chunk belongs to",
    ),
    (f"{_CONN}.MooncakeKVManager.send_aux", ("req",), "keep a first token from another request"),
    (f"{_CONN}.MooncakeKVManager.check_status", ("bootstrap_room",), "stop when a room is aborted"),
    (f"{_CONN}.MooncakeKVManager.record_failure", ("bootstrap_room", "failure_reason"), "tell why a room failed"),
    (f"{_CONN}.MooncakeKVSender.clear", (), "forget what an ended request asked for"),
    (
        f"{_CONN}.MooncakeKVReceiver.send_metadata",
        ("kv_indices",),
        "know the pages that decode allocated for a room",
    ),
    (
        f"{_CONN}.MooncakeKVReceiver._connect_to_bootstrap_server",
        ("bootstrap_info",),
        "add the handshake to decode's registration",
    ),
    (f"{_CONN}.MooncakeKVReceiver.poll", (), "close a room before its pages are freed"),
    (f"{_CONN}.MooncakeKVReceiver.abort", (), "close a room before its pages are freed"),
    (f"{_CONN}.MooncakeKVReceiver.clear", (), "close a room before its pages are freed"),
    ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", (), "recognise the one KV layout that is tiered"),
)


def installed_sglang_version() -> str | None:
    """Version of the SGLang that would be imported, or None."""
    try:
        return str(importlib.import_module("sglang").__version__)
    except Exception:  # noqa: BLE001 (a broken SGLang may raise anything at import)
        try:
            return importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            return None


def version_supported(version: str) -> bool:
    """Whether ``version`` lies in the tested range."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    return len(numbers) == 3 and OLDEST_SGLANG <= numbers <= NEWEST_SGLANG


def check_extension_points() -> list[ExtensionPoint]:
    """Look for every extension point in the SGLang that is installed. Imports SGLang; raises nothing."""
    points = [_check_choices()]
    points += [_check(name, parameters, needed_for) for name, parameters, needed_for in _REQUIRED]
    return points


def require_extension_points() -> None:
    """Raise SpectrumKVError that names every missing extension point."""
    missing = [point for point in check_extension_points() if not point.found]
    if missing:
        lines = "\n".join(f"  - {point.name}: {point.detail} (needed to {point.needed_for})" for point in missing)
        raise SpectrumKVError(
            f"SGLang {installed_sglang_version()} lacks what the spectrumkv backend extends:\n{lines}\n"
            "Install SGLang 0.5.16 to 0.5.23, or start this server with --disaggregation-transfer-backend mooncake."
        )


def _check_choices() -> ExtensionPoint:
    needed_for = "accept the backend's name on the command line"
    try:
        _choices_extender()
    except Exception as error:  # noqa: BLE001 (as below)
        return ExtensionPoint("add_disagg_transfer_backend_choices", needed_for, False, str(error))
    return ExtensionPoint("add_disagg_transfer_backend_choices", needed_for, True, "found")


def _check(name: str, parameters: tuple[str, ...], needed_for: str) -> ExtensionPoint:
    try:
        target = resolve(name)
    except Exception as error:  # noqa: BLE001 (importing a broken or half-installed SGLang may raise anything)
        return ExtensionPoint(name, needed_for, False, f"not found ({error})")
    if parameters:
        try:
            signature = inspect.signature(inspect.unwrap(target))
        except (TypeError, ValueError) as error:
            return ExtensionPoint(name, needed_for, False, f"signature unreadable ({error})")
        lacking = [parameter for parameter in parameters if parameter not in signature.parameters]
        if lacking:
            return ExtensionPoint(name, needed_for, False, f"takes {signature}, expected {', '.join(lacking)} in it")
    return ExtensionPoint(name, needed_for, True, "found")


def resolve(name: str) -> Any:
    """The object with the dotted ``name``. Raises ImportError or AttributeError."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name and not ".".join(parts[:split]).startswith(error.name):
                raise  # a module that SGLang itself needs is missing
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise ImportError(f"no module for {name}")


def _choices_extender() -> Any:
    try:
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices  # 0.5.17 on
    except ImportError:
        from sglang.srt.server_args import add_disagg_transfer_backend_choices
    return add_disagg_transfer_backend_choices


def add_backend_choices() -> None:
    """Let the command line accept ``spectrumkv`` and ``spectrumkv_tcp``."""
    _choices_extender()([BACKEND, BACKEND_TCP])


def alias_to_mooncake(server_args: Any) -> str | None:
    """Rewrite our backend's name to SGLang's own; returns the name that was chosen, or None when it was another.

    SGLang does the same for its own ``mooncake_tcp``; every ``== "mooncake"`` in it then holds for us.
    """
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    except ImportError:
        chosen = server_args.disaggregation_transfer_backend
        if chosen not in (BACKEND, BACKEND_TCP):
            return None
        server_args.disaggregation_transfer_backend = _mooncake_name(chosen)
        return str(chosen)
    view = resolving_view(server_args)
    chosen = view.disaggregation_transfer_backend
    if chosen not in (BACKEND, BACKEND_TCP):
        return None
    if getattr(view, "disaggregation_enable_kv_checksum", False):
        raise SpectrumKVError(
            "--disaggregation-enable-kv-checksum compares KV bit by bit, but tiered KV is lossy by design: "
            "drop the flag or use --disaggregation-transfer-backend mooncake"
        )
    declare_resolution(server_args, BACKEND, disaggregation_transfer_backend=_mooncake_name(chosen))
    return str(chosen)


def _mooncake_name(chosen: str) -> str:
    return "mooncake_tcp" if chosen == BACKEND_TCP else "mooncake"


def request_room(req: Any) -> int | None:
    """Bootstrap room of SGLang's Req."""
    room = getattr(req, "bootstrap_room", None)
    return None if room is None else int(room)


def request_prompt(req: Any) -> Any:
    """Token ids of SGLang's Req, a sequence of int; None where prefill and decode may hold other ones for it.

    The side that reads images, sound or embeddings puts ids of its own in their place, and a retracted request comes to
    prefill again with its answer so far.
    """
    if getattr(req, "multimodal_inputs", None) is not None or getattr(req, "input_embeds", None) is not None:
        return None
    if len(getattr(req, "output_ids", None) or ()):
        return None
    return getattr(req, "origin_input_ids", None)


def request_adapter(req: Any, scheduler: Any) -> str | None:
    """Name of the LoRA adapter that SGLang's Req is computed with; "": none; None: its Scheduler does not tell.

    Req has the id only (0.5.16 to 0.5.23): `LoRARef.deterministic_id` of name and path for ``--lora-paths``, random for
    an adapter that was loaded later.
    """
    lora_id = getattr(req, "lora_id", None)
    if lora_id is None:
        return ""
    try:
        return str(scheduler.tp_worker.model_runner.lora_manager.lora_refs[lora_id].lora_name)
    except (AttributeError, KeyError, TypeError):
        return None


def request_parameters(req: Any, name: str) -> Any:
    """What a request carries as ``custom_params[name]`` of its sampling parameters; None: nothing.

    SGLang passes the dictionary on as it came, nested values included, from both of its APIs.
    """
    parameters = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    return parameters.get(name) if isinstance(parameters, dict) else None


def scheduler_overlaps(scheduler: Any) -> bool:
    """Whether a scheduler launches a forward before it processes the results of the last one."""
    return bool(getattr(scheduler, "enable_overlap", False))


def total_kv_heads(scheduler: Any) -> int:
    """KV heads of the model that SGLang's Scheduler serves, over all ranks; 0 where SGLang does not say.

    Its own KVArgs name it on decode only while its staging buffer is on.
    """
    try:
        return int(scheduler.model_config.get_total_num_kv_heads())
    except Exception:  # noqa: BLE001 (models whose configuration has no such number)
        return 0


def attention_tp(manager: Any) -> tuple[int, int]:
    """Size of the attention tensor-parallel group of SGLang's KV manager, and the rank in it."""
    size = int(manager.attn_tp_size)
    return size, int(manager.kv_args.engine_rank) % size


def plain_pool_type() -> type:
    """SGLang's pool class for plain MHA/GQA KV."""
    return resolve("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool")


# Attention modules that own a rotary embedding and rotate in some of their layers only, or by other angles than it has.
ATTENTION_WITH_OTHER_ANGLES = frozenset(
    {
        "AfmoeAttention",
        "Cohere2MoeAttention",
        "CohereAttention",
        "Exaone4Attention",
        "ExaoneMoEAttention",
        "HunYuanAttention",
        "XllmAttention",
    }
)


def served_module(scheduler: Any) -> Any | None:
    """The model of SGLang's Scheduler, a torch module; None where its worker keeps it elsewhere, as MLX's does."""
    return getattr(getattr(getattr(scheduler, "tp_worker", None), "model_runner", None), "model", None)


def attention_layer_type() -> type:
    """SGLang's layer that writes keys and values of one ``layer_id`` into the pool."""
    return resolve("sglang.srt.layers.radix_attention.RadixAttention")


def rotary_types() -> tuple[type, ...]:
    """SGLang's rotary embeddings that turn a token by its one position, as row ``position`` of ``cos_sin_cache`` says.

    The cache [positions, rotary dim] holds cosines and then sines of half the rotary dims, scaled frequencies and
    YaRN's factor included. "Dynamic" NTK is among them: SGLang computes its table once. The attribute may be another
    tensor later: `reserve_rope_cache_for_long_sequences` lengthens it to the context length and 256 rows more before
    the pools are made, forwards may move or cast it. It is float32 on CUDA (and on ROCm from 0.5.23 on), and of the
    model's dtype on a CPU.
    """
    package = "sglang.srt.layers.rotary_embedding"
    return (
        resolve(f"{package}.base.RotaryEmbedding"),
        resolve(f"{package}.base.LinearScalingRotaryEmbedding"),
        resolve(f"{package}.rope_variant.Llama3RotaryEmbedding"),
        resolve(f"{package}.rope_variant.DynamicNTKAlphaRotaryEmbedding"),
        resolve(f"{package}.rope_variant.DynamicNTKScalingRotaryEmbedding"),
        resolve(f"{package}.yarn.YaRNScalingRotaryEmbedding"),
    )


def is_rotary(module: Any) -> bool:
    """Whether a torch module looks like a rotary embedding of any kind."""
    return hasattr(module, "is_neox_style") or "Rot" in type(module).__name__ or "RoPE" in type(module).__name__


def outside_frequencies(model: Any) -> list[tuple[Any, float]]:
    """Frequencies (tensor) and factor of rotary embeddings that ``model`` computes once for all layers, outside them.

    Gemma 3's layers keep rotary embeddings that they do not use where these say otherwise.
    """
    return [
        (module.inv_freq, float(module.attention_scaling))
        for module in model.modules()
        if type(module).__name__ == "Gemma3RotaryEmbedding"
    ]


def mooncake_engine(manager: Any) -> Any:
    """Mooncake's own TransferEngine behind SGLang's wrapper, which swallows error codes."""
    return manager.engine.engine


def served_model_name(server_args: Any) -> str:
    """The model's name as SGLang's own metrics label it."""
    try:
        from sglang.srt.runtime_context import get_serving  # 0.5.17 on

        name = get_serving().served_model_name
    except Exception:  # noqa: BLE001 (absent in 0.5.16, or not published yet; a label must not stop a server)
        name = getattr(server_args, "served_model_name", None)
    return str(name or getattr(server_args, "model_path", ""))


@dataclass(frozen=True)
class ServedModel:
    """What a server was told to serve. ``path``: a directory, a weight file or a hub id."""

    path: str
    quantization: str | None
    revision: str | None
    download_dir: str | None

    def local_path(self) -> Path | None:
        """Where the model lies on this machine; None when it is not here. Downloads nothing."""
        if os.path.exists(self.path):
            return Path(self.path)
        try:
            from huggingface_hub import snapshot_download

            found = snapshot_download(
                self.path, revision=self.revision, cache_dir=self.download_dir, local_files_only=True
            )
        except Exception:  # noqa: BLE001 (no hub id, not downloaded, or no huggingface_hub: it is not here)
            return None
        return Path(found)


def served_model(server_args: Any) -> ServedModel:
    """The model that ``server_args`` names, as the operator gave it."""
    return ServedModel(
        path=str(server_args.model_path),
        quantization=getattr(server_args, "quantization", None),
        revision=getattr(server_args, "revision", None),
        download_dir=getattr(server_args, "download_dir", None),
    )


def scheduler_tp_rank(scheduler: Any) -> int:
    """Tensor parallel rank of SGLang's Scheduler."""
    parallel = getattr(scheduler, "ps", None)  # up to 0.5.20 or later
    if parallel is None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
    return int(parallel.tp_rank)


def kv_poll_failed() -> int:
    """SGLang's status of a room that failed."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    return int(KVPoll.Failed)


def kv_poll_terminal() -> tuple[int, int]:
    """SGLang's statuses after which it frees a room's pages."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    return int(KVPoll.Success), int(KVPoll.Failed)


def active_backend() -> str | None:
    """The backend name that the launching process chose, inherited by its children; None when it was another."""
    return os.environ.get(ACTIVE_VARIABLE) or None


# ---- traces ------------------------------------------------------------------------------------------------------


def tracing_is_on() -> bool:
    """Whether this process exports OpenTelemetry spans: `--enable-trace`, with the packages that it needs."""
    from sglang.srt.observability.trace import get_global_tracing_enabled

    return bool(get_global_tracing_enabled())


def request_trace(req: Any) -> Any | None:
    """The trace of SGLang's Req, as a copy that other threads may use; None for a request that is not traced."""
    trace = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    if trace is None or not trace.tracing_enable:
        return None
    copied = trace.copy_for_thread()
    return copied if copied.tracing_enable else None


def add_spans(trace: Any, thread: str, span: Span) -> None:
    """Add ``span`` with its children to a request's trace, under a span of this thread as SGLang makes them.

    Args:
        trace: from `request_trace`.
        thread: name for this thread, where SGLang has not named it.
        span: with its end.
    """
    from sglang.srt.observability.trace import trace_set_thread_info

    trace_set_thread_info(thread)
    trace = trace.copy_for_thread()
    if hasattr(trace, "pid"):  # 0.5.16 would show the thread that the copy was made in
        trace.pid = threading.get_native_id()
    trace.rebuild_thread_context(_nanoseconds(span.start))
    _add_slices(trace, span)
    trace.abort(_nanoseconds(span.end))  # ends the thread's span; the request goes on


def _add_slices(trace: Any, span: Span) -> None:
    trace.trace_slice_start(span.name, span.level, ts=_nanoseconds(span.start))
    for child in span.children:
        _add_slices(trace, child)
    if span.error:
        _mark_as_failed(trace, span)
    trace.trace_slice_end(span.name, span.level, ts=_nanoseconds(span.end), attrs=dict(span.attributes))


def _mark_as_failed(trace: Any, span: Span) -> None:
    """Give the open slice of ``span`` OpenTelemetry's error status, for which SGLang's traces have no call."""
    from opentelemetry.trace import Status, StatusCode

    slices = trace.thread_context.cur_slice_stack if trace.thread_context else ()
    if slices and slices[-1].slice_name == span.name:  # else its level is above SGLANG_TRACE_LEVEL
        slices[-1].span.set_status(Status(StatusCode.ERROR, span.error))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
