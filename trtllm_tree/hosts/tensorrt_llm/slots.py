"""What every pool slot holds between two steps: the next window's parents, and the request's seed and sampling options.

Takes the place of TensorRT-LLM's own slot storage, whose `fill_all_slot_ids` is the one call of a step that gets the
requests and runs on the host, before a captured graph is replayed. Must not know models, caches or how a tree is drawn.
Importing this module imports no TensorRT-LLM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.hosts.tensorrt_llm.recurrent import TreeLinks
from trtllm_tree.sampling.gumbel import SlotDraws
from trtllm_tree.tree.future import FutureParentMap

_LOGGER = logging.getLogger(__name__)
_MAX_INT32 = 2**31 - 1
# Seeds of requests that gave none; apart from the small ones that people give.
_OWN_SEEDS = 2**63
# What the worker does not honour, and the values that ask for nothing. Newer versions refuse such requests
# themselves when they are admitted; here it is too late to fail one alone.
_IGNORED_VALUES: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_length": (0,),
    # TensorRT-LLM's own default is that large.
    "no_repeat_ngram_size": (0, 2**30),
    "top_p_decay": (0.0, 1.0),
}
# The same of the request itself, under the names of newer and older versions.
_IGNORED_PARTS = {
    "bad words": ("py_bad_words", "bad_words_list"),
    "embedding_bias": ("py_embedding_bias", "embedding_bias"),
    "logprobs": ("py_return_log_probs",),
    "return_context_logits": ("py_return_context_logits",),
    "return_generation_logits": ("py_return_generation_logits",),
    "logits processors": ("py_logits_post_processors",),
    "guided_decoding": ("guided_decoding_params",),
}


@dataclass(frozen=True)
class SlotOptions:
    """Sampling options of one request, as `kernels.sampled_tokens` reads them; temperature 0 is the argmax."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class ContextRow:
    """One prompt of a step: whether its prefill ends, and the token behind this chunk if it does not."""

    is_last: bool
    next_token: int


def request_options(request: Any) -> SlotOptions:
    """What a TensorRT-LLM request asks for, read as TensorRT-LLM does: no option at all decodes greedily.

    A request without a seed is given one by its id, so that all ranks agree.
    """
    config = request.sampling_config
    temperature, top_k, top_p = (_option(config, name) for name in ("temperature", "top_k", "top_p"))
    no_option = temperature is None and top_k is None and top_p is None
    is_greedy = no_option or temperature == 0 or top_k == 1 or top_p == 0
    seed = _option(config, "random_seed", "seed")
    return SlotOptions(
        temperature=0.0 if is_greedy else 1.0 if temperature is None else float(temperature),
        top_k=min(top_k or 0, _MAX_INT32),
        top_p=1.0 if top_p is None else float(top_p),
        min_p=float(_option(config, "min_p") or 0.0),
        seed=_OWN_SEEDS | int(request.py_request_id) if seed is None else int(seed),
    )


def ignored_options(request: Any) -> list[str]:
    """Options of a TensorRT-LLM request that ask for something, and that a tree does without."""
    values = {name: _option(request.sampling_config, name) for name in _IGNORED_VALUES}
    found = [name for name, value in values.items() if value not in (None, *_IGNORED_VALUES[name])]
    return found + [
        option
        for option, names in _IGNORED_PARTS.items()
        if any(_asks(getattr(request, name, None)) for name in names)
    ]


class UploadedDraws(SlotDraws):
    """`SlotDraws` whose options come in one copy a step, without waiting for the device.

    Whether a row is drawn is decided on the device, so that a graph captured over greedy dummies serves any batch.

    Args:
        greedy: take the argmax whatever the requests say.
    """

    def __init__(
        self, num_slots: int, max_rows: int, *, device: torch.device | str, greedy: bool = False
    ) -> None:
        super().__init__(num_slots, max_rows, device=device)
        self.is_greedy = greedy
        self._warned = False

    def upload(self, slots: Sequence[int], options: Sequence[SlotOptions]) -> None:
        """Requests with these options take pool slots."""
        if self.is_greedy and any(o.temperature for o in options) and not self._warned:
            self._warned = True
            _LOGGER.warning("greedy verification: the temperature of requests is ignored")
        floats = torch.tensor([[o.temperature, o.top_p, o.min_p] for o in options], dtype=torch.float32)
        temperatures, top_ps, min_ps = floats.view(torch.int32).t().long()
        columns = [
            torch.tensor(list(slots)),
            torch.tensor([_signed(o.seed) for o in options]),
            temperatures,
            torch.tensor([o.top_k for o in options]),
            top_ps,
            min_ps,
        ]
        # From pageable memory on purpose: the driver takes a copy at once, so no buffer can change under it.
        rows = torch.stack(columns).to(self._seeds.device, non_blocking=True)
        self._seeds.index_copy_(0, rows[0], rows[1])
        self._options.index_copy_(1, rows[0], rows[2:].int())


class SlotTrees:
    """The part of the storage that knows no TensorRT-LLM: parents and options by pool slot, and who owns each slot.

    Args:
        num_slots: pool slots, the dummy one included.
        num_nodes: N.
    """

    def __init__(self, num_slots: int, num_nodes: int, device: torch.device) -> None:
        self.next_parents = FutureParentMap(num_slots, num_nodes, device)
        # Of a target with recurrent layers.
        self.links: TreeLinks | None = None
        self.context_rows: tuple[ContextRow, ...] = ()
        self.draws: UploadedDraws | None = None
        self._owners: dict[int, int] = {}
        self._warned: set[str] = set()
        self._chain = self.next_parents.parents[0].clone()

    def restart(self, draws: UploadedDraws) -> None:
        """Nobody owns a slot yet; options go to `draws` from now on."""
        self.draws = draws
        self._owners.clear()

    def note(self, context_requests: Sequence[Any], generation_requests: Sequence[Any]) -> None:
        """Take the requests of a step: those that are new in their slot start with the chain and their own options."""
        self.context_rows = tuple(_context_row(request) for request in context_requests)
        new: dict[int, Any] = {}
        for request in (*context_requests, *generation_requests):
            slot = request.py_seq_slot
            if slot is None or getattr(request, "is_cuda_graph_dummy", False):
                continue
            if self._owners.get(slot) != request.py_request_id:
                self._owners[slot] = request.py_request_id
                new[slot] = request
        if new:
            self._start(new)

    def forget(self, slot: int) -> None:
        """The request in `slot` has ended."""
        self._owners.pop(slot, None)
        self.next_parents.reset(slot)

    def _start(self, requests: dict[int, Any]) -> None:
        for request in requests.values():
            self._warn(request)
        options = {slot: request_options(request) for slot, request in requests.items()}
        parents = self.next_parents.parents
        slots = torch.tensor(list(options)).to(parents.device, non_blocking=True)
        parents.index_copy_(0, slots, self._chain.expand(len(options), -1))
        if self.draws is not None:
            self.draws.upload(list(options), list(options.values()))

    def _warn(self, request: Any) -> None:
        """Once an option; what follows is served without it."""
        for option in ignored_options(request):
            if option not in self._warned:
                self._warned.add(option)
                _LOGGER.warning(
                    "request %s asks for %s, which is ignored under draft trees, in this and all later requests",
                    request.py_request_id,
                    option,
                )


@functools.cache
def tree_slot_storage(base: type) -> Any:
    """`TreeSlotStorage` over TensorRT-LLM's `DynamicTreeSlotStorage`.

    Its own trees stay chains in every slot, the dummy's included: what attention reads is published by the worker.
    """

    class TreeSlotStorage(base):  # type: ignore[misc, valid-type]
        """Per-slot storage of TensorRT-LLM with this package's parents, seeds and sampling options beside its own."""

        def __init__(self, replaced: Any) -> None:
            """Take the place of `replaced`, in the middle of a step."""
            _, num_nodes, mask_width = replaced.packed_mask.shape
            # No top-k: the dummy's tree is then the chain as well.
            super().__init__(num_slots=replaced.dummy_slot_id, n_dt=num_nodes, mask_width=mask_width)
            self.all_ids_buf.copy_(replaced.all_ids_buf)
            device = self.all_ids_buf.device
            self.trees = SlotTrees(self.packed_mask.shape[0], num_nodes, device)

        def fill_all_slot_ids(self, context_requests: Any, generation_requests: Any) -> None:
            """Called before every step, replayed or not, with the requests in batch order."""
            super().fill_all_slot_ids(context_requests, generation_requests)
            self.trees.note(context_requests, generation_requests)

        def next_links_from_slots(self, slot_ids: torch.Tensor, count: int) -> Any:
            """Called before every step, for recurrent layers: first children and next siblings of our trees."""
            if self.trees.links is None:
                return super().next_links_from_slots(slot_ids, count)
            return self.trees.links.of(self.trees.next_parents.parents[slot_ids[:count]])

        def apply_no_tree_linear_chain(
            self, next_token: torch.Tensor, next_sibling: torch.Tensor, slot_ids: torch.Tensor, count: int
        ) -> Any:
            """Called behind that, where it exists; a slot without a tree of ours holds the chain already."""
            return next_token, next_sibling

        def mark_invalid(self, slot_id: int) -> None:
            """Called when a request leaves its slot."""
            super().mark_invalid(slot_id)
            self.trees.forget(slot_id)

    return TreeSlotStorage


def _context_row(request: Any) -> ContextRow:
    # Prompts that only warm up may lack it; they are whole.
    if getattr(request, "is_last_context_chunk", True):
        return ContextRow(is_last=True, next_token=0)
    behind = request.context_current_position + request.context_chunk_size
    return ContextRow(is_last=False, next_token=request.get_token(0, behind))


def _option(config: Any, *names: str) -> Any:
    """The first of these options that is set; older versions wrap each value in a list."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, Iterable):
            value = next(iter(value), None)
        if value is not None:
            return value
    return None


def _asks(value: Any) -> bool:
    return value is not None and value is not False and (not hasattr(value, "__len__") or len(value) > 0)


def _signed(seed: int) -> int:
    """Two's complement: the key's 64 bits are what counts."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
