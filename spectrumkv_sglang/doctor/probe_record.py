"""What is the configuration's probe record worth for the model?"""

from __future__ import annotations

from pathlib import Path

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.verification.enforcement import TierDecision, UnprovenTiersError
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint, fingerprint_model


def check_probe(section: Section, config: SpectrumKVConfig, model_directory: Path | None) -> None:
    """Decides as a server does at its start, but for the KV pool's dtype and ``--quantization``, which only it knows.

    Without ``model_directory`` the record is held against the configuration alone.
    """
    record = config.probe

    def fingerprint() -> ModelFingerprint:
        if record is None:
            raise ValueError("without a record there is nothing to compare a model with")
        probed = record.fingerprint
        if model_directory is None:
            return probed
        return fingerprint_model(model_directory, quantization=probed.quantization, dtype=probed.dtype)

    decision = config.decide_tiers(fingerprint)
    tiers = ", ".join(tier.label for tier in decision.allowed_tiers)
    state = decision.state
    if state is ProbeState.NOT_NEEDED:
        section.ok("probe", f"not needed: {state.meaning}")
    elif state is ProbeState.WAIVED:
        section.warning("probe", f"waived: {state.meaning}", "leave require_probe out to serve only what was probed")
    elif not decision.restricted:
        probed_on = f"probe of {record.date}" if record is not None else "probe"
        if model_directory is None:
            section.info("probe", f"{probed_on}: its record fits this configuration", "compare with: --model-path DIR")
        else:
            section.ok("probe", f"verified: {probed_on} judged this model and policy; tiers {tiers}")
    else:
        _tell_restriction(section, decision, config, str(model_directory or "MODEL"), tiers)


def _tell_restriction(
    section: Section, decision: TierDecision, config: SpectrumKVConfig, model: str, tiers: str
) -> None:
    why = "; ".join((decision.state.meaning, *decision.reasons))
    remedy = f"{decision.probe_command(model)}, or set allowed_tiers: [high, mid]"
    try:
        decision.require(model, strict=config.strict)
    except UnprovenTiersError:
        cause = decision.unsafe or "strict is set"
        section.problem("probe", f"{decision.state.value}: {why}; a server does not start: {cause}", remedy)
        return
    section.warning("probe", f"{decision.state.value}: {why}; a server uses tiers {tiers} only", remedy)
