"""`spectrumkv doctor`: will SpectrumKV work here, what will it do, and what to do about each problem."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spectrumkv_sglang.doctor.extension_points import check_sglang_extension_points
from spectrumkv_sglang.doctor.findings import Finding, Report, Section, Severity, make_report
from spectrumkv_sglang.doctor.gpu import check_gpus
from spectrumkv_sglang.doctor.pair import examine_pair
from spectrumkv_sglang.doctor.transport import check_transport
from spectrumkv_sglang.doctor.versions import check_versions
from spectrumkv_sglang.version import __version__

__all__ = ["Finding", "Report", "Severity", "examine", "examine_pair"]


def examine(config_path: Path | None, model_directory: Path | None, environ: Mapping[str, str]) -> Report:
    """Checks what can be checked without starting a server. Takes up to a minute, most of it for importing SGLang."""
    with ThreadPoolExecutor() as pool:  # the slow checks wait for processes of their own
        checks = [
            pool.submit(check_versions, environ.get("SGLANG_PLUGINS")),
            pool.submit(check_sglang_extension_points),
            pool.submit(check_transport, environ),
            pool.submit(check_gpus),
        ]
        settings_and_model = _check_settings_and_model(config_path, model_directory, environ)
        sections = [check.result() for check in checks]
    return make_report(__version__, [*sections, *settings_and_model])


def _check_settings_and_model(
    config_path: Path | None, model_directory: Path | None, environ: Mapping[str, str]
) -> list[Section]:
    try:
        from spectrumkv_sglang.doctor.model import check_model
        from spectrumkv_sglang.doctor.settings import check_settings
    except ModuleNotFoundError as error:
        # Profiles need the quantisers, and those torch, which comes with SGLang.
        section = Section("configuration")
        section.info("configuration", f"cannot be checked without {error.name}")
        return [section]
    settings, config = check_settings(config_path, environ, model_directory)
    return [settings] if model_directory is None else [settings, check_model(model_directory, config)]
