"""CURVE keys of the control channel, made from the secret that prefill and decode share.

Both key pairs follow from the secret, so one file on every host is all there is to hand out. A peer without the secret
knows neither the private key that it must prove to hold nor can it read or replay what others said: CURVE (the
CurveZMQ handshake of libzmq) agrees on fresh keys and counts messages for each connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.control_secret import read_control_secret
from spectrumkv_sglang.errors import SpectrumKVError


@dataclass(frozen=True)
class KeyPair:
    """One CURVE key pair, both halves as 40 letters of Z85."""

    public: bytes
    private: bytes = field(repr=False)


@dataclass(frozen=True)
class ControlKeys:
    """The two key pairs of everybody who holds the secret: ``decode`` listens, ``prefill`` connects."""

    decode: KeyPair
    prefill: KeyPair

    @classmethod
    def from_secret(cls, secret: bytes) -> ControlKeys:
        """Keys that are equal for equal secrets. Raises SpectrumKVError where pyzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise SpectrumKVError(
                "control_secret_file is set, but this pyzmq was built without CURVE: install its wheel, which has it"
            )
        return cls(_pair(secret, b"skv-decode"), _pair(secret, b"skv-prefill"))

    @classmethod
    def of(cls, config: SpectrumKVConfig) -> ControlKeys | None:
        """Keys from ``config.control_secret_file``; None: the channel is open. Raises SpectrumKVError."""
        path = config.control_secret_file
        return None if path is None else cls.from_secret(read_control_secret(path))

    @property
    def fingerprint(self) -> str:
        """What tells two secrets apart and gives neither away: decode's public key."""
        return self.decode.public.decode("ascii")


def _pair(secret: bytes, role: bytes) -> KeyPair:
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return KeyPair(zmq.curve_public(private), private)
