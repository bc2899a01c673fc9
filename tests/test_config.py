"""Configuration from file and environment, and every way it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from spectrumkv_sglang.config import LAUNCH_CONFIG_KEYS, ConfigError, SpectrumKVConfig, load_config
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.importance.scorers import RandomScorer, WindowScorer
from spectrumkv_sglang.launch_config import LaunchConfig
from spectrumkv_sglang.lossless.codec import CodecName
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.tuning.settings import ControllerSettings
from spectrumkv_sglang.verification.record import ProbeRecord


def write(tmp_path: Path, text: str, name: str = "skv.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = load_config(environ={})
    assert config.model_dump() == {
        "enabled": True,
        "budget": 0.3,
        "allowed_tiers": (Tier.HIGH, Tier.MID, Tier.LOW),
        "profile": "balanced",
        "codec": CodecName.none,
        "sink_tokens": 4,
        "recent_tokens": 64,
        "min_tokens": 64,
        "scorer": "window",
        "scorer_window": 32,
        "scorer_stride_samples": 32,
        "slot_bytes": 16 * 1024 * 1024,
        "landing_slots": 16,
        "staging_slots": 8,
        "slots_per_chunk": 6,
        "open_timeout_s": 5.0,
        "slot_wait_s": 1.0,
        "write_timeout_s": 60.0,
        "unpack_timeout_s": 30.0,
        "quarantine_s": 90.0,
        "lease_s": 120.0,
        "control_host": None,
        "control_port": None,
        "control_secret_file": None,
        "tune_tcp": True,
        "transfer_log": None,
        "seed": 0,
        "strict": False,
        "require_probe": True,
        "probe_max_kl": 0.03,
        "probe_max_dppl_pct": 5.0,
        "probe_min_top1": 0.9,
        "controller": ControllerSettings().model_dump(),
        "probe": None,
    }
    assert not config.controller.enabled
    assert config == SpectrumKVConfig()
    assert config.reachable_budget == pytest.approx(68 / 256)
    assert config.make_scorer() == WindowScorer(32, 32)


def test_every_field_says_what_it_is() -> None:
    for name, field in SpectrumKVConfig.model_fields.items():
        assert field.description, name


def test_file_values(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "budget: 0.6\nallowed_tiers: [mid, high]\nslot_bytes: 4MiB\n"
        "transfer_log: /var/log/skv.jsonl\nscorer: random\nseed: 7\n",
    )
    config = load_config(path, environ={})
    assert config.budget == 0.6
    assert config.allowed_tiers == (Tier.HIGH, Tier.MID)
    assert config.slot_bytes == 4 * 1024 * 1024
    assert config.transfer_log == Path("/var/log/skv.jsonl")
    assert config.make_scorer() == RandomScorer(7)
    assert config.reachable_budget == pytest.approx((132 + 130) / 512)


def test_path_from_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "budget: 0.7\n")
    assert load_config(environ={"SPECTRUMKV_CONFIG": str(path)}).budget == 0.7
    other = write(tmp_path, "budget: 0.8\n", "other.yaml")
    assert load_config(other, environ={"SPECTRUMKV_CONFIG": str(path)}).budget == 0.8


def test_launch_config_section(tmp_path: Path) -> None:
    launch = "format: 1\nbackend: spectrumkv\nsglang: {common: {model-path: /models/x}}\n"
    path = write(tmp_path, f"{launch}spectrumkv:\n  budget: 0.3\n")
    assert load_config(path, environ={}).budget == 0.3
    assert load_config(write(tmp_path, "spectrumkv:\n"), environ={}) == SpectrumKVConfig()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), environ={}) == SpectrumKVConfig()


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("enabled", "false", False),
        ("budget", "0.6", 0.6),
        ("allowed_tiers", "high,mid", (Tier.HIGH, Tier.MID)),
        ("allowed_tiers", '["high", "mid"]', (Tier.HIGH, Tier.MID)),
        ("profile", "int8", "int8"),
        ("sink_tokens", "8", 8),
        ("recent_tokens", "0", 0),
        ("min_tokens", "0", 0),
        ("scorer", "uniform", "uniform"),
        ("scorer_window", "0", 0),
        ("scorer_stride_samples", "0", 0),
        ("slot_bytes", "1048576", 1048576),
        ("landing_slots", "32", 32),
        ("staging_slots", "1", 1),
        ("tune_tcp", "false", False),
        ("codec", "zstd", CodecName.zstd),
        ("slots_per_chunk", "8", 8),
        ("open_timeout_s", "0.5", 0.5),
        ("slot_wait_s", "0", 0.0),
        ("write_timeout_s", "10", 10.0),
        ("unpack_timeout_s", "2", 2.0),
        ("quarantine_s", "1.5", 1.5),
        ("lease_s", "300", 300.0),
        ("control_host", "10.0.0.1", "10.0.0.1"),
        ("control_host", "", None),
        ("control_port", "18000", "18000-18000"),
        ("control_port", "18000 - 18015", "18000-18015"),
        ("control_port", "", None),
        ("control_secret_file", "secret", Path("secret")),
        ("control_secret_file", "", None),
        ("transfer_log", "log.jsonl", Path("log.jsonl")),
        ("transfer_log", "", None),
        ("seed", "5", 5),
        ("strict", "true", True),
        ("require_probe", "false", False),
        ("probe_max_kl", "0.1", 0.1),
        ("probe_max_dppl_pct", "2", 2.0),
        ("probe_min_top1", "0.95", 0.95),
    ],
)
def test_every_field_by_environment(tmp_path: Path, field: str, text: str, value: object) -> None:
    path = write(tmp_path, "budget: 0.9\nslot_bytes: 65536\nseed: 1\ncontrol_host: a\ntransfer_log: b\n")
    config = load_config(path, environ={f"SPECTRUMKV_{field.upper()}": text, "PATH": "/bin"})
    assert getattr(config, field) == value


def test_the_environment_case_covers_every_field() -> None:
    marks = test_every_field_by_environment.pytestmark  # type: ignore[attr-defined]
    cases = next(mark for mark in marks if mark.name == "parametrize").args[1]
    assert {case[0] for case in cases} == set(SpectrumKVConfig.model_fields) - {"controller", "probe"}


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "budget: 0.9\n"), environ={"SPECTRUMKV_BUDGET": ""}).budget == 0.9


def test_variables_that_are_no_fields_but_ours() -> None:
    load_config(
        environ={
            "SPECTRUMKV_ACTIVE": "1",
            "SPECTRUMKV_LOOPBACK": "/plan",
            "SPECTRUMKV_TEST_FAULT": "x",
            "SPECTRUMKV_CONFIG": "",
        }
    )


def test_the_process_environment_does_not_leak_into_plain_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRUMKV_BUDGET", "0.9")
    assert SpectrumKVConfig().budget == 0.3
    assert load_config().budget == 0.9


def test_a_profile_path_in_a_file_is_relative_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, "name: mine\ntiers:\n  high: {keys: int8, values: int4}\n", "mine.yaml")
    config = load_config(write(tmp_path, "profile: ./mine.yaml\n"), environ={})
    assert config.loaded_profile.name == "mine"
    assert config.reachable_budget == pytest.approx((130 + 68) / 512)


REFUSED_FILES = [
    ("budget: 0", ["budget = 0", "greater than 0", "at most 1"]),
    ("budget: 1.5", ["budget = 1.5", "less than or equal to 1"]),
    ("budget: much", ["budget = 'much'", "number"]),
    ("budget: .nan", ["budget"]),
    ("sink_tokens: -1", ["sink_tokens = -1", "at least 0", "tokens"]),
    ("sink_tokens: 1.5", ["sink_tokens = 1.5", "integer"]),
    ("allowed_tiers: [mid, low]", ["allowed_tiers", "must contain high"]),
    ("allowed_tiers: []", ["allowed_tiers", "must contain high"]),
    ("allowed_tiers: [high, medium]", ["allowed_tiers", "unknown tier 'medium'", "high, mid, low"]),
    ("allowed_tiers: 3", ["allowed_tiers = 3", "list of tiers"]),
    ("profile: spektrum", ["profile = 'spektrum'", "unknown profile", "spectrum-safe"]),
    ("profile: ./absent.yaml", ["profile", "cannot read profile file"]),
    ("scorer: oracle", ["scorer = 'oracle'", "choose from window, exact"]),
    ("scorer_window: 0\nscorer_stride_samples: 0", ["must not both be 0"]),
    ("slot_bytes: 4096", ["slot_bytes = 4096", "at least 65536"]),
    ("slot_bytes: 70000", ["slot_bytes = 70000", "a multiple of 4096"]),
    ("slot_bytes: lots", ["slot_bytes = 'lots'"]),
    ("landing_slots: 0", ["landing_slots = 0", "at least 1"]),
    ("slots_per_chunk: 17", ["slots_per_chunk (17)", "landing_slots (16)"]),
    ("write_timeout_s: 0", ["write_timeout_s = 0", "above 0", "seconds"]),
    ("seed: -1", ["seed = -1"]),
    ("control_port: 0", ["control_port = 0", "1 to 65535"]),
    ("control_port: 18015-18000", ["control_port", "the lower one first"]),
    ("control_port: 18000-70000", ["control_port", "1 to 65535"]),
    ("control_port: http", ["control_port = 'http'", "18000-18015"]),
    ("control_port: [18000]", ["control_port", "18000-18015"]),
    ("budget: 0.2", ["budget 0.2 is below 0.266", "high, mid, low", "'balanced'", "raise budget"]),
    ("budget: 0.5\nprofile: spectrum-safe", ["budget 0.5 is below 0.508", "tiers high, mid"]),
    ("budget: 0.5\nallowed_tiers: [high, mid]", ["budget 0.5 is below 0.512", "tiers high, mid"]),
    ("profile: native-packed\nbudget: 0.55", ["budget 0.55 is below 1", "native-packed"]),
    ("write_timeout_s: 200", ["lease_s (120) must exceed write_timeout_s (200)"]),
    ("bugdet: 0.5", ["unknown field 'bugdet'", "did you mean budget?"]),
    ("spectrumkv:\n  bugdet: 0.5", ["section spectrumkv", "unknown field 'bugdet'"]),
    ("model: x", ["unknown field 'model'"]),
    ("- budget", ["expected fields and values"]),
    ("budget: true", ["budget = True", "not true or false"]),
    ("seed: false", ["seed = False", "not true or false"]),
    ("enabled: 2", ["enabled = 2"]),
    ("strict: perhaps", ["strict = 'perhaps'"]),
    ("strict: true\nrequire_probe: false", ["strict and require_probe: false contradict each other"]),
    ("budget: 0.5\nseed: 1\nbudget: 0.6", ["not valid YAML", "'budget' twice", "line 3"]),
    ("spectrumkv: {seed: 1, seed: 2}", ["'seed' twice"]),
    ("spectrumkv: {seed: 1}\nspectrumkv: {seed: 2}", ["'spectrumkv' twice"]),
    ("budget: .5\nspectrumkv: {}", ["beside section spectrumkv", "'budget'", "move it into section spectrumkv"]),
    ("model: x\nspectrumkv: {}", ["beside section spectrumkv", "unknown field 'model'"]),
    ("formats: 1\nspectrumkv: {}", ["unknown field 'formats'", "did you mean format?"]),
    ("transfer_log: 2026-99-99", ["not valid YAML"]),
    ("spectrumkv: 3", ["section spectrumkv", "expected fields and values, got 3"]),
    ("budget: [", ["not valid YAML"]),
]


@pytest.mark.parametrize(("text", "parts"), REFUSED_FILES, ids=[text for text, _ in REFUSED_FILES])
def test_a_file_is_refused_by_name_field_and_range(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"SPECTRUMKV_BUDGET": "2"}, ["environment variable SPECTRUMKV_BUDGET = '2'", "at most 1"]),
        ({"SPECTRUMKV_ALLOWED_TIERS": "low"}, ["SPECTRUMKV_ALLOWED_TIERS = 'low'", "must contain high"]),
        ({"SPECTRUMKV_BUGDET": "0.5"}, ["SPECTRUMKV_BUGDET", "did you mean SPECTRUMKV_BUDGET?", "unset"]),
        ({"SPECTRUMKV_BUDGET": "0.1"}, ["budget 0.1 is below 0.266", "from SPECTRUMKV_BUDGET"]),
        ({"SPECTRUMKV_PROBE": "{}"}, ["SPECTRUMKV_PROBE", "cannot come from the environment", "spectrumkv probe"]),
        ({"SPECTRUMKV_CONFIG": "/nowhere/skv.yaml"}, ["/nowhere/skv.yaml", "--spectrumkv-config", "SPECTRUMKV_CONFIG"]),
    ],
)
def test_the_environment_is_refused_by_variable(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ)
    for part in parts:
        assert part in str(caught.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "budget: 3\nlanding_slots: 0\n"), environ={"SPECTRUMKV_SEED": "x"})
    for part in ("budget = 3", "landing_slots = 0", "SPECTRUMKV_SEED = 'x'"):
        assert part in str(caught.value)


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "sglang: {common: &b {budget: 0.4, seed: 3}}\nspectrumkv:\n  <<: *b\n  budget: 0.6\n")
    config = load_config(path, environ={})
    assert (config.budget, config.seed) == (0.6, 3)


def test_what_stands_beside_the_section_is_what_a_launch_config_holds() -> None:
    assert {*LAUNCH_CONFIG_KEYS, "spectrumkv"} == set(LaunchConfig.model_fields)


# ---- the controller's section ------------------------------------------------------------------------------------


def test_every_field_of_the_controller_says_what_it_is() -> None:
    for name, field in ControllerSettings.model_fields.items():
        assert field.description, name


def test_the_environment_beats_the_controllers_section_field_by_field(tmp_path: Path) -> None:
    path = write(tmp_path, "controller: {enabled: true, max_kl: 0.01, ttft_target_s: 2, seed: 7}\n")
    environ = {
        "SPECTRUMKV_CONTROLLER_DRY_RUN": "true",
        "SPECTRUMKV_CONTROLLER_MAX_KL": "",
        "SPECTRUMKV_CONTROLLER_TTFT_TARGET_S": "0.5",
        "SPECTRUMKV_CONTROLLER_CANDIDATES": '[{"profile": "int8", "budget": 0.6, "kl": 0.002}]',
    }
    found = load_config(path, environ=environ).controller
    assert (found.enabled, found.dry_run, found.max_kl, found.ttft_target_s, found.seed) == (True, True, None, 0.5, 7)
    assert [candidate.label for candidate in found.candidates] == ["int8@0.6"]


def test_the_environment_alone_makes_a_controller() -> None:
    assert load_config(environ={"SPECTRUMKV_CONTROLLER_ENABLED": "true"}).controller.enabled


def test_a_candidates_profile_path_is_relative_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, "name: mine\ntiers:\n  high: {keys: int8, values: int8}\n", "mine.yaml")
    path = write(tmp_path, "controller: {candidates: [{profile: ./mine.yaml, budget: 0.6, kl: 0.1}], safe: mine@0.6}\n")
    assert load_config(path, environ={}).controller.candidates[0].label == "mine@0.6"


REFUSED_SECTIONS = [
    ("{enabeld: true}", ["controller.enabeld", "not permitted", "the section holds enabled"]),
    ("{max_kl: -1}", ["controller.max_kl = -1", "greater than or equal to 0", "nats"]),
    ("{ttft_target_s: 0}", ["controller.ttft_target_s = 0", "greater than 0", "seconds"]),
    ("{ttft_target_s: .nan}", ["controller.ttft_target_s"]),
    ("{explore: 0.9}", ["controller.explore = 0.9"]),
    ("{seed: true}", ["controller.seed = True", "not true or false"]),
    ("{candidates: []}", ["controller.candidates", "at least 1"]),
    ("{candidates: [{profile: intt8, budget: 0.6, kl: 0}]}", ["candidates.0.profile", "unknown profile 'intt8'"]),
    ("{candidates: [{profile: int8, budget: 0.6}]}", ["candidates.0.kl", "required"]),
    ("{candidates: [{profile: int8, budget: 0.6, kl: 0}, {profile: int8, budget: 0.6, kl: 1}]}", ["int8@0.6 twice"]),
    ("{safe: balanced}", ["safe is 'balanced'", "balanced@0.3"]),
    ("true", ["controller = True", "not true or false"]),
    ("3", ["controller = 3"]),
]


@pytest.mark.parametrize(("section", "parts"), REFUSED_SECTIONS, ids=[text for text, _ in REFUSED_SECTIONS])
def test_a_controllers_section_is_refused_by_place(tmp_path: Path, section: str, parts: list[str]) -> None:
    path = write(tmp_path, f"controller: {section}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_a_controllers_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="environment variable SPECTRUMKV_CONTROLLER_MAX_KL = 'much'"):
        load_config(environ={"SPECTRUMKV_CONTROLLER_MAX_KL": "much"})
    with pytest.raises(ConfigError, match=r"_MAXKL is no .*mean SPECTRUMKV_CONTROLLER_MAX_KL"):
        load_config(environ={"SPECTRUMKV_CONTROLLER_MAXKL": "1"})


def test_an_error_in_the_controllers_section_names_where_it_comes_from(tmp_path: Path) -> None:
    def error(section: str, **environ: str) -> str:
        variables = {f"SPECTRUMKV_CONTROLLER_{name}": value for name, value in environ.items()}
        with pytest.raises(ConfigError) as caught:
            load_config(write(tmp_path, f"controller: {section}\n"), environ=variables)
        return str(caught.value)

    of_the_file = error("{safe: [1]}", SAFE_KL="0.1")  # not of the variable whose name begins alike
    assert "skv.yaml: controller.safe = [1]" in of_the_file
    assert "SPECTRUMKV_CONTROLLER_SAFE_KL" not in of_the_file
    no_section = error("true", MAX_KL="0.1")
    assert "skv.yaml: controller = True" in no_section
    assert "SPECTRUMKV_CONTROLLER_MAX_KL" not in no_section
    of_both = error("{candidates: [{profile: int8, budget: 0.6, kl: 0.002}]}", SAFE="int8@0.7")
    assert "safe is 'int8@0.7', expected one of the candidates int8@0.6" in of_both
    assert re.search(r"from \S*skv.yaml, SPECTRUMKV_CONTROLLER_SAFE\)", of_both)
    with pytest.raises(ConfigError, match=r"controller: safe is 'x'.*\(from SPECTRUMKV_CONTROLLER_SAFE\)"):
        load_config(environ={"SPECTRUMKV_CONTROLLER_SAFE": "x"})


# ---- the probe's record ----------------------------------------------------------------------------------------------


def probe_section(**changes: object) -> dict[str, object]:
    """A sealed record as it stands in a file, with ``changes`` made afterwards."""
    config = load_config(environ={})
    record = ProbeRecord.sealed(
        verdict="low_allowed",
        allowed_tiers=["high", "mid", "low"],
        rule="all needle trials pass",
        date="2026-01-02T03:04:05Z",
        tool_version="1",
        sglang_version="0.5.20",
        policy=config.probed_policy(),
        scores={"niah_passed": 3, "niah_trials": 3, "control_passed": 3, "gate": {}},
        fingerprint={"weights": "w", "config": "c", "tokenizer": "t", "quantization": "none", "dtype": "bfloat16"},
    )
    return {**record.model_dump(mode="json"), **changes}


def write_probe(tmp_path: Path, section: object) -> Path:
    return write(tmp_path, yaml.safe_dump({"spectrumkv": {"probe": section}}, sort_keys=False))


def test_a_probe_record_is_read_from_the_files_section(tmp_path: Path) -> None:
    config = load_config(write_probe(tmp_path, probe_section()), environ={"SPECTRUMKV_BUDGET": "0.6"})
    assert config.probe is not None
    assert config.probe.allowed_tiers == (Tier.HIGH, Tier.MID, Tier.LOW)
    assert not config.probe.edited
    assert config.probe.policy.differences(config.probed_policy()) == []


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        (probe_section(format=2), ["probe.format", "expected probe format 1, got 2"]),
        (probe_section(format=True), ["probe.format", "got True"]),
        (probe_section(verdict="fine"), ["probe.verdict", "got 'fine'"]),
        (probe_section(allowed_tiers=["low"]), ["probe.allowed_tiers", "must contain high"]),
        (probe_section(allowed_tiers=["high", "lowest"]), ["probe.allowed_tiers", "unknown tier 'lowest'"]),
        (probe_section(policy={}), ["probe.policy.budget", "required"]),
        (probe_section(extra=1), ["probe.extra", "not permitted"]),
        ({}, ["probe.verdict", "required"]),
        ([1], ["probe", "got [1]"]),
        (True, ["probe", "not true or false"]),
    ],
)
def test_a_corrupt_probe_section_says_to_probe_again(tmp_path: Path, section: object, parts: list[str]) -> None:
    path = write_probe(tmp_path, section)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    for part in [str(path), "run `spectrumkv probe` again", *parts]:
        assert part in str(caught.value)


def test_a_restricted_configuration_keeps_a_budget_that_it_no_longer_reaches() -> None:
    config = load_config(environ={"SPECTRUMKV_BUDGET": "0.3", "SPECTRUMKV_SEED": "5"})
    assert config.reachable_budget < 0.3  # computed before, and not carried over
    restricted = config.restricted_to((Tier.HIGH, Tier.MID))
    assert (restricted.budget, restricted.seed, restricted.allowed_tiers) == (0.3, 5, (Tier.HIGH, Tier.MID))
    assert restricted.reachable_budget == pytest.approx((132 + 130) / 512)
    assert config.allowed_tiers == (Tier.HIGH, Tier.MID, Tier.LOW)


@pytest.mark.parametrize(
    ("profile", "budget"), [("native-packed", 1.0), ("int8", 0.55), ("spectrum", 0.55), ("balanced", 0.3)]
)
def test_an_unset_budget_follows_the_profile(tmp_path: Path, profile: str, budget: float) -> None:
    assert load_config(write(tmp_path, f"profile: {profile}\n"), environ={}).budget == budget


def test_native_packed_at_full_budget_is_no_contradiction(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "profile: native-packed\nbudget: 1\n"), environ={}).reachable_budget == 1.0


def test_the_configuration_is_immutable() -> None:
    config = SpectrumKVConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.budget = 0.3
    assert issubclass(ConfigError, SpectrumKVError)


def test_a_codec_and_the_controller_exclude_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, "codec: zstd\ncontroller: {enabled: true}\n")
    with pytest.raises(ConfigError, match=r"codec \(zstd\) and controller.enabled cannot go together"):
        load_config(path, environ={})
