"""Numbers that the importance kernels, their torch reference and the host agree on."""

from __future__ import annotations

RECEIVED_ONE = 2**32
"""Fixed-point number of an attention probability of 1 in the sums of attention received."""
MOST_OBSERVATIONS = 2**30
"""Observations after which a slot takes no more: its fixed-point sum cannot overflow."""

REQUEST_COLUMNS = 8
"""int32 columns of a request: row in the batch, first key in the slot list, tokens before the forward's own, keys,
first query, queries, first key whose score is published, one unused."""
ITEM_COLUMNS = 8
"""int32 columns of a work item. Both passes: first key of the request in the slot list, first query, queries of the
request, first row (a row is a (query, head of the group) pair), first key, key after the last, first log-sum. The first
pass also: key splits of the request."""
LAYER_COLUMNS = 2
"""Columns of the two layer tables: int64 key buffer (units of 16 bytes from the first one) and window; float32 scaling
and logit cap (0 for none)."""
NO_WINDOW = 2**30
"""Window of a layer that sees all earlier keys."""
