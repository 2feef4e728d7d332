"""Benchmark of a whole speculative round without its model forwards: what drafting a tree costs besides.

The forwards return tensors that lie ready, so that everything that runs belongs to the round. All drafts and all
target choices come from the same few tokens, so that accepted paths are long, as with a good drafter.

Legend: B requests, N nodes, K lanes, S draft steps, H draft hidden, F target features, V/Vd target/draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.bench.ops.entry import Case, Cost, OpBench, Workload, normal, page_table
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
        self._lanes = normal(generator, (batch, lanes, case["H"]), self.dtype)
        sizes = [batch] + [batch * lanes] * (case["S"] - 1)
        self._logits = [_peaked(generator, rows, case["Vd"], lanes) for rows in sizes]
        self.d2t: torch.Tensor | None = torch.zeros(case["Vd"], dtype=torch.int64, device=generator.device)
        self._next_logits: Iterator[torch.Tensor] = iter(())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        self._next_logits = iter(self._logits)
        return self._rows

    def chain_rows(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, batch: RoundBatch
    ) -> torch.Tensor:
        return self._rows

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
            write_slots=((pages * PAGE + torch.arange(nodes, device=device)).int(),),
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

    def step(self) -> torch.Tensor:
        """One round; returns the accepted lengths int32 [B]."""
        window = self.round.open_window(self._batch)
        return self.round.close_window(self._batch, window, self._logits).accept_len


def _cost(case: Case) -> Cost:
    """Every logit read once. The rest is small, or depends on what is accepted."""
    draft_rows = case["B"] * (1 + (case["S"] - 1) * case["K"])
    return Cost(2 * (case["B"] * case["N"] * case["V"] + draft_rows * case["Vd"]))


def _build(case: Case, sets: int, generator: torch.Generator) -> Workload:
    return Workload([RoundRig(case, generator).step for _ in range(sets)])


_MODEL = {"L": 32, "H": 4096, "F": 3 * 4096, "Vd": 32000, "V": 128256}
ROUND_GLUE = OpBench(
    "round_glue",
    ("tests/gpu/test_round_graph.py",),
    tuple(
        Case({"B": b, "K": k, "S": s, "N": n, **_MODEL}, "bfloat16")
        for b, k, s, n in ((8, 4, 5, 32), (1, 4, 5, 32), (32, 8, 6, 64))
    ),
    _cost,
    _build,
)
