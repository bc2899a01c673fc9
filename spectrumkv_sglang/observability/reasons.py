"""Why a chunk took the path it took, and what went wrong when something did.

The values are label values of the metrics, field values of the transfer log and words in log lines, so that one word
found in any of them can be searched for in the others. Every set is closed: a label has no values but these.
"""

from __future__ import annotations

from enum import Enum


class Path(str, Enum):
    """How the KV of a chunk crossed the network."""

    TIERED = "tiered"
    NATIVE = "native"


class TokenTier(str, Enum):
    """Tier label of a counted token; NONE is a token of a chunk that took the native path."""

    HIGH = "high"
    MID = "mid"
    LOW = "low"
    NONE = "none"


class SlotState(str, Enum):
    """State of a landing or staging slot."""

    IN_USE = "in_use"
    FREE = "free"
    QUARANTINED = "quarantined"


class Wait(str, Enum):
    """What a chunk waited for."""

    SLOT = "slot"
    OPEN = "open"
    DONE = "done"


class Rejection(str, Enum):
    """Why a control message was thrown away."""

    STALE = "stale"
    GARBAGE = "garbage"
    UNKNOWN_PEER = "unknown_peer"
    UNAUTHENTICATED = "unauthenticated"


class ProbeState(str, Enum):
    """What the probe's record is worth for the model and the policy that are served."""

    VERIFIED = "verified"
    NOT_NEEDED = "not_needed"
    MISSING = "missing"
    EDITED = "edited"
    CHANGED = "changed"
    NOT_PASSED = "not_passed"
    WAIVED = "waived"

    @property
    def meaning(self) -> str:
        """One line for logs and docs."""
        return _PROBE_STATE_MEANING[self]


class Reason(str, Enum):
    """Why a chunk travelled on its path."""

    TIERED = "tiered"
    BELOW_MIN_TOKENS = "below_min_tokens"
    PEER_FORBIDS_TIER = "peer_forbids_tier"

    BYPASS = "bypass"
    DRY_RUN = "dry_run"
    PEER_WITHOUT_SPECTRUMKV = "peer_without_spectrumkv"
    PROTOCOL_VERSION = "protocol_version"
    SECRET_MISMATCH = "secret_mismatch"
    DISABLED = "disabled"
    TP_MISMATCH = "tp_mismatch"
    PIPELINE_PARALLEL = "pipeline_parallel"
    MLA = "mla"
    HYBRID_STATE = "hybrid_state"
    DRAFT_KV = "draft_kv"
    HOST_DESTINATION = "host_destination"
    DCP = "dcp"
    STAGING = "staging"
    UNSUPPORTED_POOL = "unsupported_pool"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    GEOMETRY_MISMATCH = "geometry_mismatch"
    TIER_FORBIDDEN = "tier_forbidden"
    ROTATION_UNKNOWN = "rotation_unknown"
    ROOM_UNKNOWN_TO_PLUGIN = "room_unknown_to_plugin"
    POOL_EXHAUSTED = "pool_exhausted"
    OPEN_TIMEOUT = "open_timeout"
    CONTROL_ERROR = "control_error"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    REGISTRATION_FAILED = "registration_failed"
    MOONCAKE_BATCHING = "mooncake_batching"
    PAYLOAD_REJECTED = "payload_rejected"
    INTERNAL_ERROR = "internal_error"

    @property
    def path(self) -> Path:
        """The path that this reason belongs to: a reason never occurs on both."""
        tiered = (Reason.TIERED, Reason.BELOW_MIN_TOKENS, Reason.PEER_FORBIDS_TIER)
        return Path.TIERED if self in tiered else Path.NATIVE

    @property
    def meaning(self) -> str:
        """One line for logs and docs: what happened and what an operator can do about it."""
        return _REASON_MEANING[self]


class DecisionReason(str, Enum):
    """Why the controller chose what it chose for a room."""

    NO_SAMPLE = "no_sample"
    BAD_REQUEST = "bad_request"
    BELOW_MIN = "below_min"
    FIXED = "fixed"
    BYPASS = "bypass"
    ENVELOPE = "envelope"
    HOLD = "hold"
    EXPLORE = "explore"
    ACCURACY_FLOOR = "accuracy_floor"
    SLO = "slo"
    COOLDOWN = "cooldown"

    @property
    def meaning(self) -> str:
        """One line for logs and docs."""
        return _DECISION_MEANING[self]


class CodecOutcome(str, Enum):
    """What the configured lossless codec did with a payload, or why it let it pass."""

    COMPRESSED = "compressed"
    LINK_UNKNOWN = "link_unknown"
    LINK_FAST = "link_fast"
    NO_GAIN = "no_gain"
    PEER_LACKS_CODEC = "peer_lacks_codec"
    WRONG_MEMORY = "wrong_memory"
    FAILED = "failed"

    @property
    def meaning(self) -> str:
        """One line for logs and docs."""
        return _CODEC_MEANING[self]


class FailureCause(str, Enum):
    """Why a tiered chunk failed after it was started."""

    WRITE_FAILED = "write_failed"
    WRITE_TIMEOUT = "write_timeout"
    UNPACK_FAILED = "unpack_failed"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STALE_GENERATION = "stale_generation"
    ROOM_GONE = "room_gone"
    OTHER_REQUEST = "other_request"
    PAGE_RANGE = "page_range"
    TIER_UNDECLARED = "tier_undeclared"
    COMMIT_TIMEOUT = "commit_timeout"
    DTYPE_MISMATCH = "dtype_mismatch"
    BAD_MESSAGE = "bad_message"
    SLOT_LEASE_EXPIRED = "slot_lease_expired"
    IMPORTANCE_UNOBSERVED = "importance_unobserved"
    INTERNAL_ERROR = "internal_error"

    @property
    def meaning(self) -> str:
        """One line for logs and docs: what happened and what an operator can do about it."""
        return _FAILURE_MEANING[self]


_PROBE_STATE_MEANING: dict[ProbeState, str] = {
    ProbeState.VERIFIED: "this model passed the probe with this policy: the tiers that its record allows are in use",
    ProbeState.NOT_NEEDED: "neither the low tier nor a precision under 8 bits is configured, or nothing is tiered",
    ProbeState.MISSING: "the configuration holds no probe record",
    ProbeState.EDITED: "the probe record was changed after the probe wrote it",
    ProbeState.CHANGED: "another model or policy was probed than is served",
    ProbeState.NOT_PASSED: "the probe does not allow the low tier for this model",
    ProbeState.WAIVED: "`require_probe: false`: all configured tiers are in use without a probe",
}

_DECISION_MEANING: dict[DecisionReason, str] = {
    DecisionReason.NO_SAMPLE: "the link's rate is not known, or no longer: the safe candidate",
    DecisionReason.BAD_REQUEST: "the request's parameters could not be understood: the safe candidate",
    DecisionReason.BELOW_MIN: "shorter than min_tokens: packed at native precision",
    DecisionReason.FIXED: "nothing to choose: only SGLang's own path loses as little as is asked for",
    DecisionReason.BYPASS: "the link is too fast for a codec to pay: SGLang's own path",
    DecisionReason.ENVELOPE: "the fastest candidate for the link",
    DecisionReason.HOLD: "the candidate in use is hardly slower than the fastest: no change",
    DecisionReason.EXPLORE: "a neighbour of the fastest candidate, to learn what it takes",
    DecisionReason.ACCURACY_FLOOR: "a faster or the safe candidate would lose more than max_kl: one that does not",
    DecisionReason.SLO: "the candidates around the fastest would miss the TTFT target: another, or the fastest of all",
    DecisionReason.COOLDOWN: "a candidate that missed its target too often rests: the fastest of the others",
}

_CODEC_MEANING: dict[CodecOutcome, str] = {
    CodecOutcome.COMPRESSED: "compressed: the link saves more time than the codec takes",
    CodecOutcome.LINK_UNKNOWN: "no write to this peer has shown yet how fast the link is",
    CodecOutcome.LINK_FAST: "the link is too fast for the codec to pay",
    CodecOutcome.NO_GAIN: "next to nothing to take off, as from all quantised codes",
    CodecOutcome.PEER_LACKS_CODEC: "decode cannot bring payloads of this codec back: install its package there",
    CodecOutcome.WRONG_MEMORY: "slots lie in device memory (RDMA), where this codec does not work",
    CodecOutcome.FAILED: "the codec failed and the payload travels as it is: please report the log's traceback",
}

_REASON_MEANING: dict[Reason, str] = {
    Reason.TIERED: "packed in tiers chosen from importance and the budget",
    Reason.BELOW_MIN_TOKENS: "shorter than min_tokens: packed at native precision",
    Reason.PEER_FORBIDS_TIER: "packed without tiers that decode forbids: probe and configure both sides alike",
    Reason.BYPASS: "the controller expects SGLang's own path to be as good: the link is fast, or no loss is allowed",
    Reason.DRY_RUN: "the controller has decided and only says so: `controller: {dry_run: true}`",
    Reason.PEER_WITHOUT_SPECTRUMKV: "decode sent no SpectrumKV handshake: start it with this backend too",
    Reason.PROTOCOL_VERSION: "the peer speaks another protocol version: finish the rolling upgrade",
    Reason.SECRET_MISMATCH: "prefill and decode hold different control secrets: the same control_secret_file for all",
    Reason.DISABLED: "SpectrumKV is switched off by `enabled: false`",
    Reason.TP_MISMATCH: "neither rank's heads are a part of the other's: use TP sizes of which one divides the other",
    Reason.PIPELINE_PARALLEL: "pipeline parallelism splits the layers over ranks: not tiered",
    Reason.MLA: "the model keeps latent (MLA) KV: not tiered",
    Reason.HYBRID_STATE: "the model has recurrent or split sliding-window state beside its KV: not tiered",
    Reason.DRAFT_KV: "speculative decoding's draft KV shares the pool list: not tiered",
    Reason.HOST_DESTINATION: "decode receives into host memory: not tiered",
    Reason.DCP: "decode context parallelism spreads a request over ranks: not tiered",
    Reason.STAGING: "SGLang's own staging buffer is on: switch it off to use tiers",
    Reason.UNSUPPORTED_POOL: "the KV pool has a layout that SpectrumKV does not know: not tiered",
    Reason.UNSUPPORTED_DTYPE: "the KV dtype is not float32, float16 or bfloat16: not tiered",
    Reason.GEOMETRY_MISMATCH: "layers, heads, head size or page size differ between the peers: serve one model",
    Reason.TIER_FORBIDDEN: "decode forbids a precision that this profile needs: probe and configure both sides alike",
    Reason.ROTATION_UNKNOWN: "decode does not know the angles of keys that travel unrotated: use `keys: identity`",
    Reason.ROOM_UNKNOWN_TO_PLUGIN: "the room was registered before SpectrumKV saw it: harmless after a restart",
    Reason.POOL_EXHAUSTED: "decode had no free landing slot within slot_wait_s: raise landing_slots",
    Reason.OPEN_TIMEOUT: "decode did not answer OPEN within open_timeout_s: can prefill reach its control port?",
    Reason.CONTROL_ERROR: "the control channel refused or broke: the log line of the same time names the error",
    Reason.PAYLOAD_TOO_LARGE: "one page does not fit into a slot: raise slot_bytes",
    Reason.REGISTRATION_FAILED: "Mooncake refused to register the slots: run `spectrumkv doctor`",
    Reason.MOONCAKE_BATCHING: "SGLang is set to split transfers into index batches: not tiered",
    Reason.PAYLOAD_REJECTED: "decode refused a payload, so the chunk was sent again natively: the failures say why",
    Reason.INTERNAL_ERROR: "an unexpected error before the send: the log holds the traceback, please report it",
}

_FAILURE_MEANING: dict[FailureCause, str] = {
    FailureCause.WRITE_FAILED: "Mooncake reported a failed write: the peer died or the network broke",
    FailureCause.WRITE_TIMEOUT: "a write did not finish within write_timeout_s: slow or hung link or peer",
    FailureCause.UNPACK_FAILED: "decode could not unpack a payload: its log names the error",
    FailureCause.CHECKSUM_MISMATCH: "the bytes that landed are not the bytes that were sent",
    FailureCause.STALE_GENERATION: "a COMMIT named a slot that had been given to someone else since",
    FailureCause.ROOM_GONE: "decode had aborted or finished the room",
    FailureCause.OTHER_REQUEST: "two requests with different prompts use one room id at a time: make each id unique",
    FailureCause.PAGE_RANGE: "a COMMIT named pages outside those that decode allocated for the room",
    FailureCause.TIER_UNDECLARED: "a COMMIT used a tier that its OPEN had not declared: report it, with both versions",
    FailureCause.COMMIT_TIMEOUT: "decode did not answer COMMIT within unpack_timeout_s",
    FailureCause.DTYPE_MISMATCH: "KV of prefill and decode differs in dtype or size: one model and --dtype for both",
    FailureCause.BAD_MESSAGE: "a control message could not be read: another version or another program on the port",
    FailureCause.SLOT_LEASE_EXPIRED: "prefill took longer than lease_s to use a granted slot",
    FailureCause.IMPORTANCE_UNOBSERVED: "attention could not be observed in a forward: its tokens count as unimportant",
    FailureCause.INTERNAL_ERROR: "an unexpected error: the log holds the traceback, please report it",
}
