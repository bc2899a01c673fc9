"""A probe's verdict, scores and needles."""

from __future__ import annotations

from pathlib import Path

from spectrumkv_sglang.report.content import Picture, Section, Table, number


def probe_sections(path: Path) -> list[Section]:
    """What `spectrumkv probe --json` wrote."""
    from spectrumkv_sglang.probe.plot import draw_on
    from spectrumkv_sglang.probe.result import read_result

    result = read_result(path)
    limits = result.thresholds
    rows = [
        [policy, number(result.kl[policy]), number(result.dppl_pct[policy]), f"{result.top1[policy]:.3f}"]
        for policy in result.kl
    ]
    rows.append(["limit", number(limits["max_kl"]), number(limits["max_dppl_pct"]), f"{limits['min_top1']:.3f}"])
    needles = [["native (control)", f"{result.control.passed} of {result.control.trials}"]] + [
        [policy, f"{passed} of {result.niah.trials}"]
        for policy, passed in result.niah.passed_by_policy.items()
        if policy != "native"
    ]
    bytes_sent = [
        [f"{trial.prompt_tokens:,} tokens, depth {trial.depth:g}, {policy}", f"{answer.wire_ratio:.3f}",
         *(str(tokens) for tokens in answer.tokens_by_tier)]
        for trial in result.niah.results
        for policy, answer in trial.answers.items()
        if answer.tokens_by_tier is not None
    ]  # fmt: skip
    return [
        Section(
            f"Probe: {Path(result.model).name}, {result.profile} at {result.budget:g}",
            [
                f"Verdict: {result.verdict.replace('_', ' ')}. Tiers allowed: {', '.join(result.allowed_tiers)}.",
                *result.reasons,
                *result.advice,
            ],
            [
                Table("On text, against native", ["policy", "KL, nats a token", "perplexity, %", "top-1"], rows),
                Table("Needles found", ["policy", "found"], needles),
                Picture(
                    "probe",
                    "What each policy costs on text against its limits (dashed), and which needles were found.",
                    lambda figure: draw_on(figure, result),
                    (12.0, 3.4),
                ),
                Table(
                    "Bytes and tiers of the needle prompts", ["prompt, policy", "b", "high", "mid", "low"], bytes_sent
                ),
            ],
        )
    ]
