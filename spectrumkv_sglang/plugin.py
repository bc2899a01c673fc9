"""SGLang's entry point ``sglang.srt.plugins``: makes the backend choosable and, where it is chosen, installs it.

The launching process only accepts the name and this backend's flags and checks everything before it serves.
Its children see ``SPECTRUMKV_ACTIVE`` and install the hooks; without it nothing of SGLang's data path is touched.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from spectrumkv_sglang import sglang_compat as compat
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.transport_tuning import tcp_is_forced, tune_tcp

if TYPE_CHECKING:
    from spectrumkv_sglang.config import SpectrumKVConfig

logger = logging.getLogger(__name__)

CONFIG_FLAG = "--spectrumkv-config"
STRICT_FLAG = "--spectrumkv-strict"

_observer: Any = None


def register() -> None:
    """Called by SGLang in every process, before it parses arguments."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if multiprocessing.parent_process() is None:
        # The launching process decides anew; what a shell or another server left behind does not count.
        os.environ.pop(compat.ACTIVE_VARIABLE, None)
        if os.environ.get(compat.LOOPBACK_VARIABLE):
            _refuse_foreign_loopback()
    try:
        compat.add_backend_choices()
        for name in (compat.PD_HOOK, compat.CLI_HOOK):
            compat.resolve(name)
    except (ImportError, AttributeError) as error:
        _stop_if_requested(error)
        return
    HookRegistry.register(compat.CLI_HOOK, _add_flags, HookType.AFTER)
    HookRegistry.register(compat.PD_HOOK, _choose_backend, HookType.BEFORE)
    if os.environ.get(compat.LOOPBACK_VARIABLE) and multiprocessing.parent_process() is not None:
        _install_loopback()
    if compat.active_backend() is None:
        return
    try:
        compat.require_extension_points()
    except SpectrumKVError as error:
        # SGLang logs a plugin's exceptions and goes on; serving without the chosen backend would be silent.
        raise SystemExit(f"spectrumkv: {error}") from error
    HookRegistry.register(compat.KV_CLASS_HOOK, _kv_class, HookType.AROUND)
    HookRegistry.register(compat.REGISTRATION_HOOK, _read_registration, HookType.AROUND)
    HookRegistry.register(compat.METADATA_HOOK, _read_metadata, HookType.AROUND)
    HookRegistry.register(compat.PREFILL_QUEUE_HOOK, _attach_prefill, HookType.AROUND)
    HookRegistry.register(compat.REQUEST_HOOK, _expect_request, HookType.AROUND)
    HookRegistry.register(compat.DECODE_QUEUE_HOOK, _attach_decode, HookType.AROUND)
    HookRegistry.register(compat.RECEIVER_HOOK, _mark_receiver, HookType.AROUND)
    HookRegistry.register(compat.ATTENTION_HOOK, _attention, HookType.AROUND)


def _refuse_foreign_loopback() -> None:
    """In a launching process with ``SPECTRUMKV_LOOPBACK`` set: go on only if it is the probe's own server."""
    from spectrumkv_sglang.loopback.plan import refuse_other_servers

    try:
        refuse_other_servers()
    except SpectrumKVError as error:
        # SGLang logs a plugin's exceptions and goes on.
        raise SystemExit(f"spectrumkv: {error}") from error


def _install_loopback() -> None:
    """In a child of the probe's server."""
    from spectrumkv_sglang.loopback.hooks import install
    from spectrumkv_sglang.loopback.plan import read_plan

    try:
        plan = read_plan()
    except SpectrumKVError as error:
        raise SystemExit(f"spectrumkv: {error}") from error
    if plan is not None:
        install(plan)


def _stop_if_requested(error: Exception) -> None:
    """SGLang's argument handling is not the one we know: stop if this server asked for the backend."""
    if compat.active_backend() or any(argument.split("=")[-1].startswith(compat.BACKEND) for argument in sys.argv):
        raise SystemExit(
            f"spectrumkv: SGLang {compat.installed_sglang_version()} has no place to register the backend ({error}); "
            "install SGLang 0.5.16 to 0.5.23 or use --disaggregation-transfer-backend mooncake"
        ) from error


# ---- launching process -------------------------------------------------------------------------------------------


class _SetConfigPath(argparse.Action):
    """Hands the file's path to the scheduler processes, which do not see the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        os.environ[compat.CONFIG_VARIABLE] = os.path.abspath(values)


class _SetStrict(argparse.Action):
    """Tells the scheduler processes, and this one, to refuse a model that was not probed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        os.environ[compat.STRICT_VARIABLE] = "true"


def _add_flags(result: Any, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        CONFIG_FLAG,
        action=_SetConfigPath,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML configuration of the spectrumkv disaggregation backend (also: SPECTRUMKV_CONFIG).",
    )
    parser.add_argument(
        STRICT_FLAG,
        action=_SetStrict,
        nargs=0,
        default=argparse.SUPPRESS,
        help="Refuse to start when the spectrumkv probe's record does not fit the model (also: SPECTRUMKV_STRICT).",
    )


def _choose_backend(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang validates its disaggregation arguments."""
    chosen = compat.alias_to_mooncake(server_args)
    if chosen is None:
        return
    from spectrumkv_sglang.config import load_config
    from spectrumkv_sglang.control_secret import read_control_secret
    from spectrumkv_sglang.lossless.codec import make_codec

    # The scheduler processes check SGLang's extension points. Here that would import prometheus_client before SGLang
    # has named its multi-process folder, and the server's own metrics would be lost.
    config = load_config()
    if config.enabled:
        if config.control_secret_file is not None:
            read_control_secret(config.control_secret_file)  # the ranks read it again
        make_codec(config.codec)
        _refuse_unproven(config, compat.served_model(server_args))
    os.environ[compat.ACTIVE_VARIABLE] = chosen
    if config.tune_tcp and (chosen == compat.BACKEND_TCP or tcp_is_forced(os.environ)):
        changed = tune_tcp(os.environ)
        logger.info("Mooncake over TCP: %s", ", ".join(changed) if changed else "its variables are set already")
    what = f"with tiered KV ({config.profile})" if config.enabled else "tiered KV switched off"
    logger.info("disaggregation transfer backend %s -> mooncake, %s", chosen, what)


def _refuse_unproven(config: SpectrumKVConfig, model: compat.ServedModel) -> None:
    """Stop before a model is loaded that the scheduler processes would refuse; they check again, and the dtype too."""
    from spectrumkv_sglang.verification.served import served_fingerprint

    if not os.path.exists(model.path):
        return  # a hub id: SGLang downloads it later

    dtype = config.probe.fingerprint.dtype if config.probe is not None else ""
    decision = config.decide_tiers(lambda: served_fingerprint(model, dtype))
    decision.require(model.path, strict=config.strict)


# ---- scheduler processes -----------------------------------------------------------------------------------------


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    found = original(transfer_backend, class_type)
    if getattr(transfer_backend, "value", transfer_backend) != "mooncake" or found is None:
        return found
    from spectrumkv_sglang.transfer import manager

    ours = (manager.SpectrumKVManager, manager.SpectrumKVSender, manager.SpectrumKVReceiver)
    return next((cls for cls in ours if cls.__mro__[1] is found), found)


def _read_registration(original: Any, cls: Any, msg: list[bytes]) -> Any:
    """Take decode's handshake out of its registration; a handshake that cannot be read means native transfer."""
    from spectrumkv_sglang.transfer.errors import ControlMessageError
    from spectrumkv_sglang.transfer.handshake import decode_handshake, split_handshake

    frames, handshake = split_handshake(msg)
    info = original(cls, frames)
    if handshake is not None:
        try:
            info.spectrumkv_handshake = decode_handshake(handshake)
        except ControlMessageError as error:
            info.spectrumkv_handshake = error
    return info


def _read_metadata(original: Any, cls: Any, msg: list[bytes]) -> Any:
    """Take the digest of the prompt out of decode's message about a room's pages."""
    from spectrumkv_sglang.transfer.handshake import split_handshake
    from spectrumkv_sglang.transfer.request_identity import MAGIC, decode_prompt

    frames, prompt = split_handshake(msg, MAGIC)
    info = original(cls, frames)
    info.spectrumkv_prompt = decode_prompt(prompt)
    return info


def _mark(transfer: Any, req: Any, scheduler: Any) -> None:
    """Tell our sender or receiver whose KV it carries."""
    from spectrumkv_sglang.observability.once import log_once
    from spectrumkv_sglang.transfer.request_identity import prompt_digest

    if hasattr(transfer, "spectrumkv_prompt"):
        adapter = compat.request_adapter(req, scheduler)
        if adapter is None:
            what = "the name of a request's LoRA adapter is not known: its KV is told from others' by its room id alone"
            log_once(logger, logging.WARNING, "adapter-unknown", what)
        transfer.spectrumkv_prompt = prompt_digest(compat.request_prompt(req), adapter)
        _trace_request(req)


def _trace_transfers() -> None:
    """Where SGLang traces requests, transfers get spans in these traces."""
    if compat.tracing_is_on():
        from spectrumkv_sglang.observability.transfer_spans import TransferSpans, trace_transfers

        trace_transfers(TransferSpans(compat.add_spans))
        logger.info("SpectrumKV: transfers are traced with their requests")


def _trace_request(req: Any) -> None:
    """Before anything of the request is transferred."""
    from spectrumkv_sglang.observability.transfer_spans import process_spans

    spans, room = process_spans(), compat.request_room(req)
    if spans is None or room is None:
        return
    try:
        trace = compat.request_trace(req)
    except Exception as error:  # noqa: BLE001 (a trace must not end the scheduler)
        logger.warning("SpectrumKV: the transfer of room %d is not traced: %r", room, error)
        return
    if trace is not None:
        spans.expect(room, trace)


def _mark_receiver(original: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Before decode tells prefill the pages of the request."""
    decode_request = original(queue, req, *args, **kwargs)
    _mark(getattr(decode_request, "kv_receiver", None), req, getattr(queue, "scheduler", None))
    return decode_request


def _attach_prefill(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    kv_manager = original(queue, *args, **kwargs)
    _trace_transfers()
    kv_manager.scheduler_overlaps = partial(compat.scheduler_overlaps, queue.scheduler)
    model = compat.served_module(queue.scheduler)
    heads = compat.total_kv_heads(queue.scheduler)
    view = kv_manager.attach(queue.token_to_kv_pool, queue.draft_token_to_kv_pool, model, heads)
    if view is not None and kv_manager.prefill_rank.scores is not None:
        from spectrumkv_sglang.importance.attention_hook import AttentionObserver

        global _observer
        _observer = AttentionObserver(
            k_buffers=view.buffers.k,
            req_to_token=queue.scheduler.req_to_token_pool.req_to_token,
            scores=kv_manager.prefill_rank.scores,
            scorer=kv_manager.prefill_rank.scorer,
            on_error=kv_manager.observation_failed,
        )
    return kv_manager


def _expect_request(original: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the making of a request's sender, which carries what the request asks for: SGLang sends by it alone."""
    from spectrumkv_sglang.tuning.request_limits import CUSTOM_PARAMETER

    expect = getattr(queue.kv_manager, "expect_request", None)
    room = compat.request_room(req)
    expected = None
    if expect is not None and room is not None:
        try:
            expected = expect(room, compat.request_parameters(req, CUSTOM_PARAMETER))
        except Exception as error:  # noqa: BLE001
            # A client's parameters must not end the scheduler: its room is sent as one whose limits make no sense.
            expected = expect(room, f"unreadable: {type(error).__name__}")
    made = original(queue, req, *args, **kwargs)
    sender: Any = getattr(req, "disagg_kv_sender", None)
    _mark(sender, req, getattr(queue, "scheduler", None))
    if hasattr(sender, "spectrumkv_request"):
        sender.spectrumkv_request = expected
    return made


def _attach_decode(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    kv_manager = original(queue, *args, **kwargs)
    _trace_transfers()
    model = compat.served_module(queue.scheduler)
    heads = compat.total_kv_heads(queue.scheduler)
    kv_manager.attach(queue.token_to_kv_pool, queue.draft_token_to_kv_pool, model, heads)
    return kv_manager


def _attention(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    output = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if _observer is not None:
        _observer.observe(q, layer, forward_batch)
    return output
