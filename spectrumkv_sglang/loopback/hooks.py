"""Installs loopback mode in SGLang's scheduler processes."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang import sglang_compat as compat
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.loopback.plan import SERVER_LINE, LoopbackPlan, ResultLine, ResultWriter

_plan: LoopbackPlan | None = None
_state: Any = None


def install(plan: LoopbackPlan) -> None:
    """Register the hooks; the loopback state is made with the first forward, when the pools exist."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _plan
    _plan = plan
    HookRegistry.register(compat.RUN_BATCH_HOOK, _run_batch, HookType.AROUND)
    HookRegistry.register(compat.ATTENTION_HOOK, _attention, HookType.AROUND)
    HookRegistry.register(compat.LOGITS_HOOK, _logits, HookType.AROUND)


def _run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _plan, _state
    if _plan is not None:
        from spectrumkv_sglang.loopback.scheduler_side import LoopbackScheduler

        plan, _plan = _plan, None
        try:
            _state = LoopbackScheduler(plan, scheduler)
        except SpectrumKVError as error:  # the server answers natively; the probe reads the line and stops
            if compat.scheduler_tp_rank(scheduler) == 0:
                ResultWriter(plan.results).write(ResultLine(id=SERVER_LINE, error=str(error)))
    if _state is None:
        return original(scheduler, batch, *args, **kwargs)
    _state.before_forward(batch)
    result = original(scheduler, batch, *args, **kwargs)
    _state.after_forward(batch)
    return result


def _attention(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    output = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if _state is not None and _state.observer is not None:
        _state.observer.observe(q, layer, forward_batch)
    return output


def _logits(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    logits = original(processor, *args, **kwargs)
    if _state is not None:
        _state.collect_logits(logits)
    return logits
