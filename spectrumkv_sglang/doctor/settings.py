"""Does the configuration load, and what does it ask for?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spectrumkv_sglang.config import ConfigError, SpectrumKVConfig, load_config
from spectrumkv_sglang.control_secret import read_control_secret
from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.doctor.probe_record import check_probe

CONFIG_VARIABLE = "SPECTRUMKV_CONFIG"


def check_settings(
    path: Path | None, environ: Mapping[str, str], model_directory: Path | None = None
) -> tuple[Section, SpectrumKVConfig | None]:
    """Loads the file (or the one that SPECTRUMKV_CONFIG names, or the defaults) with the environment over it, and says
    what its probe record is worth for the model in ``model_directory`` (None: for any model)."""
    section = Section("configuration")
    source = str(path or environ.get(CONFIG_VARIABLE) or "defaults and environment")
    try:
        config = load_config(path, environ)
    except ConfigError as error:
        section.problem("configuration", str(error), "correct it; a server started with it stops with the same message")
        return section, None
    tiers = ", ".join(tier.label for tier in config.allowed_tiers)
    section.ok(
        "configuration",
        f"{source}: profile {config.profile}, budget {config.budget:g}, tiers {tiers}, scorer {config.scorer}",
    )
    if not config.enabled:
        section.warning("enabled", "false: every chunk takes SGLang's own path", "set enabled: true to use tiers")
    else:
        check_probe(section, config, model_directory)
    _check_control_channel(section, config)
    if config.transfer_log is not None:
        _check_transfer_log(section, config.transfer_log)
    return section, config


def _check_control_channel(section: Section, config: SpectrumKVConfig) -> None:
    port = f"port {config.control_port}" if config.control_port else "a random port"
    where = f"decode listens on {port}" + (f" of {config.control_host}" if config.control_host else "")
    if config.control_secret_file is None:
        section.info(
            "control channel",
            f"{where}; no secret: whoever reaches the port may connect",
            "a firewall, or control_secret_file (docs/threat_model.md); control_port fixes the port",
        )
        return
    try:
        read_control_secret(config.control_secret_file)
    except ConfigError as error:
        section.problem("control channel", str(error), "a server started with it stops with the same message")
        return
    section.ok("control channel", f"{where}; secret of {config.control_secret_file}, the same on every server")


def _check_transfer_log(section: Section, path: Path) -> None:
    writable = os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK | os.X_OK)
    if not writable or path.is_dir():
        section.warning(
            "transfer_log",
            f"{path} cannot be written: lines will be lost",
            "create its directory or change transfer_log",
        )
    else:
        section.ok("transfer_log", str(path))
