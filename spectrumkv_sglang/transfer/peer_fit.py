"""Whether a decode rank can take tiered payloads of a prefill rank, and of which of its heads."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import FailureCause, Reason
from spectrumkv_sglang.transfer.chunk_planner import PlannedChunk
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.errors import ChunkFailedError, ControlMessageError, GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.shared_heads import RankHeads, SharedHeads, shared_heads
from spectrumkv_sglang.transfer.tier_agreement import forbidden_in

logger = logging.getLogger(__name__)


class Destination(NamedTuple):
    """Where a chunk goes.

    Attributes:
        view: the heads of our pool that decode takes.
        peer: decode's handshake.
        first_head: which of decode's heads they begin at.
    """

    view: PoolView
    peer: Handshake
    first_head: int


class PeerFit:
    """Compares decode ranks with one prefill rank.

    Args:
        keys: our control secret's; None: we hold none.
        heads: KV heads of the model that the pool holds; None: not known, then decode must have as many ranks.
    """

    def __init__(self, config: SpectrumKVConfig, keys: ControlKeys | None, heads: RankHeads | None) -> None:
        self._config, self._keys, self._heads = config, keys, heads

    def require(
        self,
        view: PoolView | GoNativeError,
        session: str,
        peer: Handshake | ControlMessageError | None,
        *,
        sliced: bool,
    ) -> Destination:
        """Where tiered payloads to a peer go.

        Args:
            view: our pool, or the GoNativeError that says why its KV is not tiered.
            session: Mooncake's name of the peer.
            peer: its handshake, what was wrong with it, or None where there was none.
            sliced: the peers' TP sizes differ.

        Raises:
            GoNativeError: nowhere.
            ChunkFailedError: its KV is of another dtype, so that SGLang's own path does not fit either.
        """
        if not self._config.enabled:
            raise GoNativeError(Reason.DISABLED, "switched off by enabled: false or SPECTRUMKV_ENABLED")
        if not isinstance(view, PoolView):
            raise view
        if peer is None:
            raise GoNativeError(Reason.PEER_WITHOUT_SPECTRUMKV, f"{session} registered without a handshake")
        if isinstance(peer, ControlMessageError):
            raise GoNativeError(Reason.PROTOCOL_VERSION, str(peer))
        ours = view.geometry
        if peer.kv_dtype != ours.dtype:
            raise ChunkFailedError(
                FailureCause.DTYPE_MISMATCH,
                f"prefill keeps KV in {ours.dtype}, decode at {peer.control_endpoint} in {peer.kv_dtype}: start both "
                "with the same --dtype and --kv-cache-dtype",
            )
        theirs = (peer.layers, peer.kv_heads, peer.head_dim, peer.v_head_dim, peer.page_size)
        kv_heads = peer.kv_heads if sliced else ours.kv_heads
        if theirs != (ours.layers, kv_heads, ours.head_dim, ours.v_head_dim, ours.page_size):
            raise GoNativeError(
                Reason.GEOMETRY_MISMATCH,
                f"prefill has {ours}, decode (layers, kv heads, head dim, v head dim, page size) = {theirs}",
            )
        shared = self._require_shared_heads(peer, ours.kv_heads) if sliced else SharedHeads(0, 0, ours.kv_heads)
        self._require_same_secret(peer)
        return Destination(view.of_heads(shared.ours, shared.count), peer, shared.theirs)

    def require_agreement(self, planned: PlannedChunk, peer: Handshake) -> None:
        """Say which tiers are not used for decode's sake; GoNativeError for what decode would refuse, without asking
        it."""
        forbidden = forbidden_in(planned.table, np.unique(planned.plan.tiers).tolist(), peer.allowed_tiers)
        if forbidden:
            raise GoNativeError(Reason.TIER_FORBIDDEN, f"it would travel with {forbidden}")
        if planned.table.needs_rotation and not peer.knows_rotation:
            raise GoNativeError(
                Reason.ROTATION_UNKNOWN,
                f"profile {planned.profile} rotates keys back by their position, and decode at {peer.control_endpoint} "
                "does not know the angles to rotate them again: serve the same model there, or transform keys by "
                "`identity`",
            )
        if planned.reason is Reason.PEER_FORBIDS_TIER:
            allowed = planned.policy.allowed_tiers
            ours = ", ".join(tier.label for tier in allowed)
            theirs = ", ".join(tier.label for tier in allowed if tier in peer.allowed_tiers)
            log_once(
                logger,
                logging.WARNING,
                "peer-forbids-tier",
                f"prefill allows tiers {ours}, decode at {peer.control_endpoint} of these only {theirs}, so only these "
                "are used: its log says why; probe and configure both sides alike",
            )

    def _require_shared_heads(self, peer: Handshake, held: int) -> SharedHeads:
        shared = None if self._heads is None or peer.heads is None else shared_heads(self._heads, peer.heads)
        if shared is None:
            raise GoNativeError(
                Reason.TP_MISMATCH,
                f"prefill has {self._heads or f'{held} heads of its own'}, decode at {peer.control_endpoint} "
                f"{peer.heads or f'{peer.kv_heads} heads of its own'}: neither is a part of the other",
            )
        return shared

    def _require_same_secret(self, peer: Handshake) -> None:
        ours = self._keys.fingerprint if self._keys is not None else ""
        if peer.control_key == ours:
            return
        if not peer.control_key:
            held = "prefill holds a control secret, decode asks for none"
        else:
            held = "decode asks for a control secret, prefill holds " + ("another one" if ours else "none")
        raise GoNativeError(
            Reason.SECRET_MISMATCH,
            f"{held} (decode at {peer.control_endpoint}): give both servers the same control_secret_file",
        )
