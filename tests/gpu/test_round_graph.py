"""The round's own operations on a GPU: no host synchronisation, no allocation, and a CUDA graph of them.

The model forwards are replaced by tensors that lie ready, so that everything that runs here belongs to the round. The
same round on the CPU (torch references) gives the values to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.gpu.sync_trap import waiting_fails
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.bench.ops.entry import Call, Case
from trtllm_tree.bench.ops.round_glue import RoundRig
from trtllm_tree.bench.ops.timing import launches
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, TreeParts
from trtllm_tree.sampling.base import SamplingBackend
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.sampling.gumbel import GumbelSampler, SlotDraws
from trtllm_tree.sampling.rejection import TreeRejectionSampler
from trtllm_tree.tree.future import FutureParentMap
from trtllm_tree.tree.lanes import TreeDraftInputs
from trtllm_tree.tree.spec import TreeSpec

BATCH, NUM_SLOTS, PAGE, PAGES, LAYERS = 3, 6, 16, 40, 3
HIDDEN, DRAFT_VOCAB, VOCAB = 64, 512, 700
CONFIGS = {
    "tree": SpeculativeConfig(tree_topk=4, num_steps=5, num_nodes=32),
    "wide tree": SpeculativeConfig(tree_topk=8, num_steps=4, num_nodes=100),
    "chain": SpeculativeConfig(tree_topk=1, num_steps=4),
}

SAMPLERS = ("greedy", "gumbel", "rejection")
# By pool slot, sampled and greedy requests in one batch.
PARAMS = {4: {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, 0: {"temperature": 1.5}, 2: {}}

pytestmark = pytest.mark.gpu


class ReadyModel:
    """A draft model whose forwards return tensors that were made before."""

    hidden_size, dtype = HIDDEN, torch.bfloat16

    def __init__(self, config: SpeculativeConfig, generator: torch.Generator, device: str) -> None:
        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

        lanes, path = config.tree_topk, config.max_path_len
        self._fused = rand(BATCH, path, HIDDEN)
        self._chain = {1: rand(BATCH, 1, HIDDEN), path: rand(BATCH, path, HIDDEN)}
        self._lanes = [rand(BATCH, lanes, HIDDEN) for _ in range(config.num_steps)]
        self._logits = [rand(BATCH * lanes, DRAFT_VOCAB) for _ in range(config.num_steps)]
        self.d2t = (torch.arange(DRAFT_VOCAB) // 3).to(device)
        self._next_logits: Iterator[torch.Tensor] = iter(())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        self._next_logits = iter(self._logits)
        return self._fused

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._chain[token_ids.shape[1] if last_rows is None else 1]

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        lanes.slots(step, token_ids.shape[0])
        lanes.positions(step, token_ids.shape[0])
        return self._lanes[step]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return next(self._next_logits)[: hidden.shape[0]]


@dataclass
class Pool:
    """Two cache groups of random rows."""

    groups: list[list[torch.Tensor]]

    def group_regions(self) -> list[list[torch.Tensor]]:
        return self.groups


@dataclass
class Rig:
    """A round with everything that it reads, equal on every device."""

    round: SpecRound
    batch: RoundBatch
    logits: torch.Tensor
    pool: Pool
    hidden: torch.Tensor

    def step(self) -> None:
        window = self.round.open_window(self.batch)
        self.round.close_window(self.batch, window, self.logits)

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {"tokens": self.round.future_input_map, "hidden": self.hidden}
        if self.round.tree is not None:
            tensors["parents"] = self.round.tree.parents.parents
        tensors |= {
            f"{g}.{i}": region for g, group in enumerate(self.pool.groups) for i, region in enumerate(group)
        }
        return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def _sampler(name: str, config: SpeculativeConfig, device: str) -> SamplingBackend:
    sizes = {"device": device, "tree": config.is_tree}
    if name == "greedy":
        return GreedySampler(BATCH, config.num_nodes, **sizes)
    draws = SlotDraws(NUM_SLOTS, BATCH * config.num_nodes, device=device)
    for slot, options in PARAMS.items():
        draws.reset(slot, SamplingParams(**options), seed=100 + slot)
    draws.plan(list(PARAMS))
    backend = GumbelSampler if name == "gumbel" else TreeRejectionSampler
    return backend(draws, BATCH, config.num_nodes, **sizes)


def _rig(config: SpeculativeConfig, device: str, sampler: str = "greedy") -> Rig:
    generator = torch.Generator().manual_seed(7)
    nodes = config.num_nodes

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    pool = Pool([[rand(PAGES, 2, PAGE, 8) for _ in range(2 * LAYERS)], [rand(PAGES, 1, PAGE, 16)]])
    hidden = rand(BATCH * nodes, HIDDEN)
    draft_table = torch.randperm(PAGES, generator=generator)[: 3 * 12].view(3, 12).int().to(device)
    shuffles = [torch.randperm(PAGES * PAGE, generator=generator)[: BATCH * nodes] for _ in pool.groups]
    write_slots = torch.stack(shuffles).view(-1, BATCH, nodes).int().to(device)
    model = ReadyModel(config, generator, device)
    spec_round = SpecRound(
        config,
        drafter=Eagle(model, config, max_batch=BATCH, vocab_size=DRAFT_VOCAB, device=device),
        sampler=_sampler(sampler, config, device),
        hidden=hidden,
        num_slots=NUM_SLOTS,
        tree=TreeParts(
            spec=TreeSpec(BATCH, nodes, hidden),
            parents=FutureParentMap(NUM_SLOTS, nodes, device),
            compactor=KVCompactor(pool),
        )
        if config.is_tree
        else None,
    )
    batch = RoundBatch(
        slots=torch.tensor([4, 0, 2], device=device),
        committed_lens=torch.tensor([17, 5, 40], dtype=torch.int32, device=device),
        write_slots=write_slots,
        draft_page_table=draft_table,
        draft_page_size=PAGE,
        max_committed_len=40,
    )
    # Tokens from 0..5 only, so that random trees and random targets really agree on long paths.
    logits = torch.full((BATCH * nodes, VOCAB), -9.0)
    picks = torch.randint(0, 6, (BATCH * nodes,), generator=generator)
    logits[torch.arange(BATCH * nodes), picks] = 1.0
    rig = Rig(spec_round, batch, logits.to(torch.bfloat16).to(device), pool, hidden)
    tokens = torch.randint(0, 6, (NUM_SLOTS, nodes), generator=generator, dtype=torch.int32)
    spec_round.future_input_map.copy_(tokens)
    if spec_round.tree is not None:
        parents = torch.tensor(
            [[-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]]
        )
        spec_round.tree.parents.parents.copy_(parents.expand(NUM_SLOTS, -1))
    return rig


def _assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_round_never_syncs_and_never_allocates(name: str, sampler: str) -> None:
    rig, reference = _rig(CONFIGS[name], "cuda", sampler), _rig(CONFIGS[name], "cpu", sampler)
    rig.step()  # compiles the kernels
    reference.step()
    _assert_same(rig.state(), reference.state())

    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with waiting_fails():
        rig.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "the round allocated memory"
    reference.step()
    _assert_same(rig.state(), reference.state())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_captured_round_replays_as_the_eager_one(name: str, sampler: str) -> None:
    rig, reference = _rig(CONFIGS[name], "cuda", sampler), _rig(CONFIGS[name], "cpu", sampler)
    rig.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.step()
    reference.step()
    _assert_same(rig.state(), reference.state())  # capturing ran nothing
    for _ in range(3):
        graph.replay()
        reference.step()
        torch.cuda.synchronize()
        _assert_same(rig.state(), reference.state())


GLUE = Case({"B": 3, "K": 4, "S": 5, "N": 32, "L": 3, "H": 64, "F": 192, "Vd": 5000, "V": 9000}, "bfloat16")


def _assert_at_most(limit: int, call: Call) -> None:
    names = launches(call)
    if not names:
        pytest.skip("the profiler sees no device activity here")
    assert len(names) <= limit, "\n".join([f"{len(names)} launches:", *sorted(names)])


def test_drafting_is_one_launch_then_two_a_step_then_one() -> None:
    # accepted_rows; logprob_topk and draft_tree_expand in each of S = 5 steps; draft_tree_select.
    _assert_at_most(12, RoundRig(GLUE, torch.Generator("cuda").manual_seed(1)).draft)


def test_a_round_is_seven_launches_before_its_drafting() -> None:
    # Open the window: chain, then tree; target tokens, verify; KV, hidden rows and positions back.
    _assert_at_most(7 + 12, RoundRig(GLUE, torch.Generator("cuda").manual_seed(1)).step)
    # Two cache groups move in one launch, too.
    _assert_at_most(7 + 12, _rig(CONFIGS["tree"], "cuda").step)
