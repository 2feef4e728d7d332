"""Which requests run next: admission, chunked prefill, and turns between prefill and decode.

Admission counts the most pages that a request can ever need, so a running request never waits for one and is
never evicted (TensorRT-LLM's GUARANTEED_NO_EVICT). A prefill step carries chunks of several prompts; while
requests decode, prefill and decode steps take turns, so that a long prompt does not stop the others.
"""

from __future__ import annotations

from collections import deque

from trtllm_tree.engine.kv_cache import KVCache
from trtllm_tree.engine.ports import Segment
from trtllm_tree.engine.request import Request


class Scheduler:
    """Requests that wait and run.

    Args:
        cache: its pages are promised at admission.
        max_batch_size: pool slots for requests.
        max_num_tokens: rows of one prefill forward.
    """

    def __init__(self, cache: KVCache, *, max_batch_size: int, max_num_tokens: int) -> None:
        self._cache = cache
        self._max_num_tokens = max_num_tokens
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._promised = [0] * len(cache.groups)
        self._prefilled_last = False
        self.waiting: deque[tuple[Request, int]] = deque()
        self.running: list[Request] = []

    def fits(self, extent: int) -> bool:
        """Whether a request of `extent` KV tokens fits an empty pool."""
        return all(
            group.pages_for(extent) < group.allocator.num_pages
            and group.pages_for(extent) <= group.page_table.shape[1]
            for group in self._cache.groups
        )

    def add(self, request: Request, extent: int) -> None:
        """Queue a request that needs at most `extent` KV tokens."""
        self.waiting.append((request, extent))

    def admit(self) -> list[Request]:
        """Start waiting requests, in order, while a slot and their pages are free."""
        admitted = []
        while self.waiting and self._free_slots:
            request, extent = self.waiting[0]
            needs = [group.pages_for(extent) for group in self._cache.groups]
            if any(
                promised + need >= group.allocator.num_pages
                for promised, need, group in zip(self._promised, needs, self._cache.groups, strict=True)
            ):
                break
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.promised_pages = needs
            self._promised = [a + b for a, b in zip(self._promised, needs, strict=True)]
            self.running.append(request)
            admitted.append(request)
        return admitted

    def finish(self, request: Request) -> None:
        """Free the slot, pages and promises of a request, whether it ran or waited."""
        if request.slot is None:
            self.waiting = deque(entry for entry in self.waiting if entry[0] is not request)
            return
        self._cache.release(request.slot)
        self._free_slots.append(request.slot)
        self._promised = [a - b for a, b in zip(self._promised, request.promised_pages, strict=True)]
        self.running.remove(request)
        request.slot = None

    def next_prefill(self) -> list[tuple[Request, Segment]]:
        """Chunks of the next prefill forward; empty when it is decode's turn or no prompt is left."""
        prefilling = [request for request in self.running if request.is_prefilling]
        can_decode = len(prefilling) < len(self.running)
        if not prefilling or (can_decode and self._prefilled_last):
            self._prefilled_last = False
            return []
        self._prefilled_last = True
        plan, row = [], 0
        for request in prefilling:
            if row == self._max_num_tokens:
                break
            segment = _next_segment(request, row, self._max_num_tokens - row)
            plan.append((request, segment))
            row += segment.length
        return plan

    def decoding(self) -> list[Request]:
        """Requests whose prompt is in the cache."""
        return [request for request in self.running if not request.is_prefilling]


def _next_segment(request: Request, row: int, max_rows: int) -> Segment:
    prompt, start = request.prompt_ids, request.committed_len
    end = min(len(prompt), start + max_rows)
    assert request.slot is not None, "a request prefills in a slot"
    return Segment(
        slot=request.slot,
        row=row,
        start=start,
        token_ids=tuple(prompt[start:end]),
        next_tokens=(*prompt[start + 1 : end + 1], *([-1] if end == len(prompt) else [])),
        is_last=end == len(prompt),
    )
