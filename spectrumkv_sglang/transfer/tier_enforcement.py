"""At server start: which tiers a rank uses, from the probe's record, the model that was loaded and its KV pool."""

from __future__ import annotations

import logging
import math

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.verification.served import served_fingerprint

logger = logging.getLogger(__name__)


def enforce_tiers(
    config: SpectrumKVConfig, model: ServedModel, geometry: KVGeometry, metrics: TransferMetrics, *, speaks: bool
) -> SpectrumKVConfig:
    """The configuration with the tiers that may be used; said in the log and in the metrics.

    Args:
        geometry: of the KV pool.
        speaks: whether this rank logs for its server; the others log at debug level.

    Raises:
        UnprovenTiersError: the server must not start.
    """
    decision = config.decide_tiers(lambda: served_fingerprint(model, geometry.dtype))
    metrics.probe_state(decision.state)
    decision.require(model.path, strict=config.strict)
    enforced = (
        config if decision.allowed_tiers == config.allowed_tiers else config.restricted_to(decision.allowed_tiers)
    )
    tiers = ", ".join(tier.label for tier in enforced.allowed_tiers)
    if decision.restricted:
        level, text = logging.WARNING, f"only tiers {tiers} are used: {decision.explanation(model.path)}"
        if (least := enforced.least_budget(geometry)) > config.budget:
            text += (
                f". Budget {config.budget:g} is below what these tiers reach on this {geometry.dtype} pool: expect b "
                f"{math.ceil(least * 1000) / 1000:g} or more"
            )
    elif decision.state is ProbeState.WAIVED:
        level, text = logging.WARNING, f"tiers {tiers} are used unproven: {decision.state.meaning}"
    else:
        level, text = logging.INFO, f"tiers {tiers}: {decision.state.meaning}"
    logger.log(level if speaks else logging.DEBUG, "SpectrumKV: %s", text)
    return enforced
