"""The shared secret of the control channel, read from a file."""

from __future__ import annotations

import logging
from pathlib import Path

from spectrumkv_sglang.config_file import ConfigError

logger = logging.getLogger(__name__)

LEAST_BYTES, MOST_BYTES = 32, 4096
_OTHERS = 0o077


def read_control_secret(path: Path) -> bytes:
    """The secret in ``path``: everything but white space at its ends, for instance from ``openssl rand -hex 32``.

    Raises:
        ConfigError: the file cannot be read, or holds less than 32 or more than 4096 bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
            mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"cannot read control_secret_file {path} (SPECTRUMKV_CONTROL_SECRET_FILE): {error}"
        ) from error
    secret = content.strip()
    if not LEAST_BYTES <= len(secret) or len(content) > MOST_BYTES:
        size = f"more than {MOST_BYTES}" if len(content) > MOST_BYTES else str(len(secret))
        raise ConfigError(
            f"control_secret_file {path} holds {size} bytes, expected {LEAST_BYTES} to {MOST_BYTES} random ones: "
            f"openssl rand -hex 32 > {path}, and the same file for every prefill and decode server"
        )
    if mode & _OTHERS:
        logger.warning("control_secret_file %s can be read by others than its owner: chmod 600 %s", path, path)
    return secret
