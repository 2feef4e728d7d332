"""`TreeDrafter`: drafts for TensorRT-LLM's `User_Provided` decoding, the flow that its documentation offers to others.

It is a facade, not the tree path. What that flow gives and takes, as read in TensorRT-LLM's source:

* A drafter gets requests and their token ids, never the target's hidden states, so an EAGLE3 head cannot draft here.
  A small language model with the target's tokenizer does.
* The target verifies one line of tokens, in Python lists on the requests, with the overlap scheduler off. So a tree
  is drafted, and its best path is handed over; siblings are never verified. `TreeEagleWorker` verifies trees.
* Every rank drafts for itself. Ranks of equal GPUs draft the same tokens, which tensor parallelism needs.
* TensorRT-LLM is taking this flow out; versions without it lack `Drafter`, and importing this module says so.

Importing this module imports TensorRT-LLM.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trtllm_tree.config.engine import DEVICES, DTYPES
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.config.tree_rules import Spelling, is_int, tree_problems
from trtllm_tree.demo import resolve_target
from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.engine.model_runner import load_model_config
from trtllm_tree.errors import ConfigError, Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.draft_lm import DraftLM, layer_problems
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.support.model_facts import read_model_facts

_LOGGER = logging.getLogger(__name__)
_SPELLING = Spelling(topk="tree_topk", steps="max_draft_len", nodes="num_nodes", root=1)
_REPORT = probe()
_REPORT.require("drafter")
_DRAFTER = _REPORT.resolved["drafter", "Drafter"]
_CONFIG = _REPORT.resolved["drafter", "UserProvidedDecodingConfig"]
# A class of a package that is not there for type checkers.
_Drafter: Any = _DRAFTER.value


class TreeDrafter(_Drafter):
    """Drafts with a small language model. Pickled into every rank, where the model is loaded at the first call.

    A request gets no drafts, and is decoded plainly, while it is longer than `max_seq_len`, has token ids that the
    draft model does not know, or finds no free slot; others are not affected.

    Args:
        draft_model: local Hugging Face directory of a model with the target's tokenizer, or "demo".
        max_draft_len: S, draft steps, and the most tokens handed over for a request and step.
        tree_topk: K, lanes of a draft step; 1 drafts a line.
        num_nodes: N, nodes of the tree that the path is chosen from, root included; None chooses.
        max_batch_size: requests drafted for at a time; K/V of this many sequences of `max_seq_len` are kept.
        max_seq_len: tokens of the longest sequence drafted for; at most what the draft model can.
        dtype, device: as in `EngineConfig`; a rank's device is its own GPU.
        max_concurrency: TensorRT-LLM drafts only while it serves at most this many requests; None always.

    Raises:
        ConfigError, UnsupportedError: options or a model that cannot be used, before anything is loaded.
    """

    # TensorRT-LLM pads drafts for its CUDA graphs, and takes back what was padded, too.
    _needs_padding_kv_extension = True

    def __init__(
        self,
        draft_model: str,
        *,
        max_draft_len: int = 5,
        tree_topk: int = 4,
        num_nodes: int | None = None,
        max_batch_size: int = 8,
        max_seq_len: int = 4096,
        dtype: str = "auto",
        device: str = "auto",
        max_concurrency: int | None = None,
    ) -> None:
        problems = tree_problems(tree_topk, max_draft_len, num_nodes, _SPELLING)
        problems += _option_problems(max_batch_size, max_seq_len, dtype, device)
        problems += _model_problems(draft_model)
        if problems:
            raise ConfigError(problems)
        nodes: Any = num_nodes
        self._config = SpeculativeConfig(tree_topk=tree_topk, num_steps=max_draft_len, num_nodes=nodes)
        self._model_dir = resolve_target(draft_model)
        model_config = load_model_config(self._model_dir)
        if problems := layer_problems(model_config):
            raise UnsupportedError(problems)
        offered = {
            "max_draft_len": max_draft_len,
            # Before versions with trees in this flow there is one line, as long as the drafts.
            "max_total_draft_tokens": max_draft_len,
            "max_concurrency": max_concurrency,
        }
        super().__init__(**{_DRAFTER.parameters[name]: offered[name] for name in _DRAFTER.parameters})
        self.max_draft_len = max_draft_len
        self._max_batch_size, self._dtype, self._device = max_batch_size, dtype, device
        self._max_seq_len = min(max_seq_len, int(model_config.max_position_embeddings))
        self._vocab_size = int(model_config.vocab_size)
        self._model: DraftLM | None = None
        self._slots = _Slots(max_batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None, "_slots": _Slots(self._max_batch_size)}

    def decoding_config(self) -> Any:
        """The `UserProvidedDecodingConfig` to give to `tensorrt_llm.LLM` as `speculative_config`."""
        return _CONFIG.value(drafter=self, max_draft_len=self._config.num_steps)

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Set `py_draft_tokens` of every generation request of the step; TensorRT-LLM calls this before its target.

        Args:
            scheduled_requests: the step's requests.
            resource_manager: not needed.
        """
        # Also for a step of prompts only: the first one comes while TensorRT-LLM measures how much memory is left
        # for its own KV cache.
        model = self._model = self._model or self._load()
        asked: dict[int, tuple[Any, list[int], int]] = {}
        for request in scheduled_requests.generation_requests:
            tokens = list(request.get_tokens(0))
            room = _room(request, len(tokens))
            request.py_draft_tokens = []
            if room > 0 and self._can_draft(tokens):
                asked[request.request_id] = (request, tokens, room)
        slots = self._slots.of(asked)
        if not slots:
            return
        drafted = model.draft(list(slots.values()), [asked[one][1] for one in slots])
        for request_id, path in zip(slots, best_paths(drafted), strict=True):
            request, _, room = asked[request_id]
            request.py_draft_tokens = path[:room]

    def _can_draft(self, tokens: Sequence[int]) -> bool:
        return len(tokens) <= self._max_seq_len and min(tokens) >= 0 and max(tokens) < self._vocab_size

    def _load(self) -> DraftLM:
        on_gpu = torch.cuda.is_available() if self._device == "auto" else self._device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        dtype = getattr(torch, self._dtype, None)
        if dtype is None:
            # The checkpoint's, as in the embedded engine; 16-bit types are slow on a CPU.
            dtype = (
                torch.float32 if not on_gpu else load_model_config(self._model_dir).dtype or torch.bfloat16
            )
        model = DraftLM(
            self._model_dir,
            self._config,
            num_slots=self._max_batch_size,
            max_seq_len=self._max_seq_len,
            dtype=dtype,
            device=device,
        )
        sizes = f"K = {self._config.tree_topk}, S = {self._config.num_steps}, N = {self._config.num_nodes}"
        _LOGGER.info("TreeDrafter: %s on %s in %s, %s", self._model_dir, device, dtype, sizes)
        return model


class _Slots:
    """Which request has which slot. Nobody says that a request ended: the one that was away longest makes room."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: OrderedDict[int, int] = OrderedDict()

    def of(self, request_ids: Iterable[int]) -> dict[int, int]:
        """Slots of as many of these requests as there are slots, those first that have one."""
        chosen = sorted(request_ids, key=lambda one: one not in self._held)[: self._num_slots]
        for request_id in chosen:
            if request_id in self._held:
                self._held.move_to_end(request_id)
        for request_id in chosen:
            if request_id not in self._held:
                full = len(self._held) == self._num_slots
                self._held[request_id] = self._held.popitem(last=False)[1] if full else len(self._held)
        return {request_id: self._held[request_id] for request_id in chosen}


def best_paths(drafted: Candidates) -> list[list[int]]:
    """Of each tree the path, root excluded, on which most tokens are expected to be accepted; of a chain all of it.

    A node is accepted with the probability that the draft model gave to its path, so a path's expectation is the sum
    of these. Ties go to the lower node, which is on the likelier path.
    """
    tokens = drafted.tokens.tolist()
    if drafted.parents is None or drafted.scores is None:
        return [row[1:] for row in tokens]
    trees = zip(tokens, drafted.parents.tolist(), drafted.scores.tolist(), strict=True)
    return [_best_path(*tree) for tree in trees]


def _best_path(tokens: list[int], parents: list[int], scores: list[float]) -> list[int]:
    expected, best = [0.0] * len(tokens), 0
    for node in range(1, len(tokens)):
        expected[node] = expected[parents[node]] + math.exp(scores[node])
        # Never true of NaN.
        if expected[node] > expected[best]:
            best = node
    path = []
    while best > 0:
        path.append(tokens[best])
        best = parents[best]
    return path[::-1]


def _room(request: Any, length: int) -> int:
    """Drafts that TensorRT-LLM reserved KV rows for, as many as it put placeholders, and that the request can use."""
    reserved = len(request.py_draft_tokens or ())
    prompt_len, budget = (
        getattr(request, name, None) for name in ("py_orig_prompt_len", "py_max_new_tokens")
    )
    if prompt_len is None or budget is None:
        return reserved
    # The target adds a token of its own.
    return min(reserved, prompt_len + budget - length - 1)


def _option_problems(
    max_batch_size: object, max_seq_len: object, dtype: object, device: object
) -> list[Problem]:
    problems = [
        Problem(name, value, "must be an integer of at least 1", f"Set {name} to {default}.")
        for name, value, default in (
            ("max_batch_size", max_batch_size, 8),
            ("max_seq_len", max_seq_len, 4096),
        )
        if not is_int(value) or value < 1
    ]
    return problems + [
        Problem(name, value, f"must be one of {', '.join(known)}", f"Set {name} to auto.")
        for name, value, known in (("dtype", dtype, DTYPES), ("device", device, DEVICES))
        if value not in known
    ]


def _model_problems(draft_model: str) -> list[Problem]:
    try:
        found = read_model_facts(resolve_target(draft_model))
    except ConfigError as error:
        return [replace(problem, option="draft_model") for problem in error.problems]
    if found is not None:
        return []
    return [Problem("draft_model", draft_model, "has no config.json to be read", "Name a model's directory.")]
