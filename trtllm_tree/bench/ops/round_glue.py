"""Benchmarks of a speculative round without its model forwards: what drafting a tree costs besides.

`round_glue` is the whole round; `drafting_glue` is its part behind the compacted window, up to the next one's tree in
the future maps.

The forwards return tensors that lie ready, so that everything that runs belongs to the round. All drafts and all
target choices come from the same few tokens, so that accepted paths are long, as with a good drafter.

Legend: B requests, N nodes, K lanes, S draft steps, H draft hidden, F target features, V/Vd target/draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.bench.ops.entry import Case, Cost, OpBench, Workload, normal, page_table, random_ids
from trtllm_tree.bench.ops.row_ops import HEAD_DIM, KV_HEADS, PAGE
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, TreeParts
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.tree.future import FutureParentMap
from trtllm_tree.tree.lanes import TreeDraftInputs
from trtllm_tree.tree.spec import TreeSpec

_COMMITTED = 100


def _config(case: Case) -> SpeculativeConfig:
    return SpeculativeConfig(tree_topk=case["K"], num_steps=case["S"], num_nodes=case["N"])


def _peaked(generator: torch.Generator, rows: int, vocab: int, topk: int) -> torch.Tensor:
    """Logits bfloat16 [rows, vocab] whose `topk` largest are the ids below `topk`, in random order."""
    logits = normal(generator, (rows, vocab), torch.bfloat16)
    order = torch.rand(rows, topk, generator=generator, device=generator.device).argsort(dim=1)
    logits[:, :topk] = (20 + order).to(torch.bfloat16)
    return logits


class ReadyModel:
    """A draft model (`ports.DraftModel`) whose forwards return tensors that were made before."""

    dtype = torch.bfloat16

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        batch, lanes, path = case["B"], case["K"], _config(case).max_path_len
        self.hidden_size = case["H"]
        self._rows = normal(generator, (batch, path, case["H"]), self.dtype)
        self._last_rows = self._rows[:, :1].clone()
        self._lanes = normal(generator, (batch, lanes, case["H"]), self.dtype)
        sizes = [batch] + [batch * lanes] * (case["S"] - 1)
        self._logits = [_peaked(generator, rows, case["Vd"], lanes) for rows in sizes]
        self.d2t: torch.Tensor | None = torch.zeros(case["Vd"], dtype=torch.int64, device=generator.device)
        self._next_logits: Iterator[torch.Tensor] = iter(())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        self._next_logits = iter(self._logits)
        return self._rows

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._rows if last_rows is None else self._last_rows

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        return self._lanes

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return next(self._next_logits)


class _Pool:
    """`ports.KVPool` of one cache group."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._regions = list(cache.unbind())

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        return [self._regions]


class RoundRig:
    """A round and all that it reads, without models."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        batch, nodes, device, config = case["B"], case["N"], generator.device, _config(case)
        cache = normal(generator, (2 * case["L"], batch, KV_HEADS, PAGE, HEAD_DIM), torch.bfloat16)
        self._hidden = normal(generator, (batch * nodes, case["F"]), torch.bfloat16)
        self._logits = _peaked(generator, batch * nodes, case["V"], case["K"])
        pages = torch.randperm(batch, generator=generator, device=device).unsqueeze(1)
        self._batch = RoundBatch(
            slots=torch.randperm(batch, generator=generator, device=device),
            committed_lens=torch.full((batch,), _COMMITTED, dtype=torch.int32, device=device),
            write_slots=(pages * PAGE + torch.arange(nodes, device=device)).int()[None],
            draft_page_table=page_table(generator, batch, -(-(_COMMITTED + 2 * nodes) // PAGE)),
            draft_page_size=PAGE,
            max_committed_len=_COMMITTED,
        )
        self.round = SpecRound(
            config,
            drafter=Eagle(
                ReadyModel(case, generator), config, max_batch=batch, vocab_size=case["Vd"], device=device
            ),
            sampler=GreedySampler(batch, nodes, device=device, tree=True),
            hidden=self._hidden,
            num_slots=batch + 1,
            tree=TreeParts(
                spec=TreeSpec(batch, nodes, self._hidden),
                parents=FutureParentMap(batch + 1, nodes, device),
                compactor=KVCompactor(_Pool(cache)),
            ),
        )
        # An accepted window, for drafting alone.
        self._predict = random_ids(generator, (batch, nodes), case["K"])
        self._accept_len = random_ids(generator, (batch,), config.max_path_len) + 1
        self._positions = torch.arange(nodes, device=device).repeat(batch, 1) + _COMMITTED

    def step(self) -> torch.Tensor:
        """One round; returns the accepted lengths int32 [B]."""
        window = self.round.open_window(self._batch)
        return self.round.close_window(self._batch, window, self._logits).accept_len

    def draft(self) -> torch.Tensor:
        """The drafting of one round; returns the next windows' tokens int32 [B, N]."""
        features = self._hidden.view(*self._predict.shape, -1)
        candidates = self.round.drafter.draft(
            self._batch,
            self._predict,
            self._accept_len,
            features,
            self._positions,
            future=self.round.future,
        )
        return candidates.tokens


def _drafting_cost(case: Case) -> Cost:
    """Every draft logit read once. The rest is small, or depends on what is accepted."""
    return Cost(2 * case["B"] * (1 + (case["S"] - 1) * case["K"]) * case["Vd"])


def _round_cost(case: Case) -> Cost:
    return Cost(2 * case["B"] * case["N"] * case["V"] + _drafting_cost(case).bytes_moved)


def _round(case: Case, sets: int, generator: torch.Generator) -> Workload:
    return Workload([RoundRig(case, generator).step for _ in range(sets)])


def _drafting(case: Case, sets: int, generator: torch.Generator) -> Workload:
    return Workload([RoundRig(case, generator).draft for _ in range(sets)])


_MODEL = {"L": 32, "H": 4096, "F": 3 * 4096, "Vd": 32000, "V": 128256}
_TESTS = ("tests/gpu/test_round_graph.py",)
_CASES = tuple(
    Case({"B": b, "K": k, "S": s, "N": n, **_MODEL}, "bfloat16")
    for b, k, s, n in ((8, 4, 5, 32), (1, 4, 5, 32), (32, 8, 6, 64))
)
ROUND_OPS = (
    OpBench("round_glue", _TESTS, _CASES, _round_cost, _round),
    OpBench("drafting_glue", _TESTS, _CASES, _drafting_cost, _drafting),
)
