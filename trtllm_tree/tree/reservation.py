"""Invariant I10: a decode step reserves the next verify window behind its own, up to the token limit.

Draft writes of a round reach past its verify window, but stay inside the next one. The verify window itself is
always allocated in full, because an accepted node may sit in any of its slots whatever its depth. The extra
window stops at the request's token limit, so it never asks for a page that admission did not count. Draft
writes past the allocated pages land in the dummy page: this costs acceptance, never correctness.
"""

from __future__ import annotations


def round_extent(committed_len: int, num_nodes: int, token_limit: int | None) -> int:
    """KV tokens to have allocated before a round.

    Args:
        committed_len: tokens in the cache before the round (vc).
        num_nodes: N, slots of one verify window.
        token_limit: prompt plus the request's token budget; None reserves no second window.
    """
    window_end = committed_len + num_nodes
    if token_limit is None:
        return window_end
    return max(window_end, min(window_end + num_nodes, token_limit))


def request_extent(num_nodes: int, token_limit: int) -> int:
    """The largest `round_extent` a request can ever need: what admission has to count.

    The last round of a request starts with at most `token_limit - 2` committed tokens (the root is committed
    but not yet in the cache, and at least one token is still missing).
    """
    return max(token_limit, token_limit - 2 + num_nodes)
