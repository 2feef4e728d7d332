"""The EAGLE drafter over a toy head, against an expansion by paths (invariants I2 and I9 from its side)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import trtllm_tree.tree
from tests.oracles import path_tree
from tests.toy import DRAFT_PAGE_SIZE, MAX_BATCH, VOCAB, PagedRows, ToyDraft, ToyModel, state_of
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Candidates, Eagle
from trtllm_tree.ports import RoundBatch

# (K, S, N): N below, at and above S + 1; one step; two mask words of lanes and of nodes.
TREES = [(2, 2, 2), (2, 3, 4), (2, 3, 10), (3, 1, 3), (4, 5, 16), (4, 4, 40), (8, 10, 72)]


def config_of(topk: int, num_steps: int, num_nodes: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        tree_topk=topk, num_steps=num_steps, num_nodes=num_nodes, speculative_model="head"
    )


class Bench:
    """A drafter over the toy head, whose requests stand behind given sequences."""

    def __init__(self, device: str, config: SpeculativeConfig, d2t: list[int] | None = None) -> None:
        self.device, self.config = device, config
        offsets = None if d2t is None else torch.tensor(d2t, device=device)
        cache = PagedRows(device, DRAFT_PAGE_SIZE, torch.float64, 1)
        self.model = ToyModel(device)
        self.draft_model = ToyDraft(self.model, cache, offsets)
        vocab = VOCAB if d2t is None else len(d2t)
        self.eagle = Eagle(self.draft_model, config, max_batch=MAX_BATCH, vocab_size=vocab, device=device)

    def batch(self, committed: list[int]) -> RoundBatch:
        slots = torch.arange(len(committed), device=self.device)
        return RoundBatch(
            slots=slots,
            committed_lens=torch.tensor(committed, dtype=torch.int32, device=self.device),
            write_slots=slots.new_empty(0, len(committed), 1, dtype=torch.int32),
            draft_page_table=self.draft_model.cache.table[slots],
            draft_page_size=DRAFT_PAGE_SIZE,
            max_committed_len=max(committed),
        )

    def draft_behind(self, sequences: list[list[int]]) -> Candidates:
        """`draft_from` of requests whose sequences, their root included, are known."""
        cache, frontier = self.draft_model.cache, [len(tokens) - 1 for tokens in sequences]
        for slot, tokens in enumerate(sequences):
            cache.write(cache.slot(slot, len(tokens) - 2), (tokens[-1], state_of(tokens)))
        hidden = [[state_of(tokens), len(tokens) - 1] for tokens in sequences]
        ints = {"dtype": torch.int32, "device": self.device}
        return self.eagle.draft_from(
            self.batch(frontier),
            torch.tensor(hidden, dtype=torch.float64, device=self.device),
            torch.tensor([tokens[-1] for tokens in sequences], **ints),
            torch.tensor(frontier, **ints),
        )

    def expected_tree(self, tokens: list[int]) -> path_tree.PathTree:
        def best(path: path_tree.Path) -> list[tuple[float, int]]:
            return self.model.best_children([*tokens, *path])

        shape = {"topk": self.config.tree_topk, "num_steps": self.config.num_steps}
        return path_tree.draft(best, tokens[-1], num_nodes=self.config.num_nodes, **shape)

    def expected_chain(self, tokens: list[int]) -> list[int]:
        def best(path: path_tree.Path) -> list[tuple[float, int]]:
            return self.model.best_children([*tokens, *path])

        return path_tree.greedy_chain(best, tokens[-1], num_steps=self.config.num_steps)


def random_sequences(seed: int, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (batch,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def check_trees(drafted: Candidates, expected: list[path_tree.PathTree]) -> None:
    assert drafted.parents is not None and drafted.scores is not None
    assert drafted.tokens.tolist() == [tree.tokens for tree in expected]
    assert drafted.parents.tolist() == [tree.parents for tree in expected]
    scores = torch.tensor([tree.scores for tree in expected])
    torch.testing.assert_close(drafted.scores.cpu(), scores, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), TREES)
def test_a_drafted_tree_equals_the_expansion_of_its_paths(device, topk, num_steps, num_nodes):
    bench = Bench(device, config_of(topk, num_steps, num_nodes))
    # Unequal lengths, and a smaller batch on the same buffers.
    for seed, batch in ((0, 4), (1, 2)):
        sequences = random_sequences(seed, batch)
        check_trees(bench.draft_behind(sequences), [bench.expected_tree(tokens) for tokens in sequences])


@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_a_drafted_chain_follows_the_best_child(device, num_steps):
    bench = Bench(device, config_of(1, num_steps, num_steps + 1))
    for seed, batch in ((2, 4), (3, 1)):
        sequences = random_sequences(seed, batch)
        drafted = bench.draft_behind(sequences)
        assert drafted.parents is None and drafted.scores is None
        assert drafted.tokens.tolist() == [bench.expected_chain(tokens) for tokens in sequences]
    # One chain row a step: the root's best child costs no forward of its own.
    assert [call for call in bench.draft_model.calls if call[0] == "chain"] == [("chain", 1)] * 2 * (
        num_steps - 1
    )


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), TREES)
def test_a_tree_costs_one_scoring_and_one_lane_forward_of_k_rows_a_step(device, topk, num_steps, num_nodes):
    bench = Bench(device, config_of(topk, num_steps, num_nodes))
    bench.draft_behind(random_sequences(4, 3))
    expected = [("logits", 3)]
    for _ in range(num_steps - 1):
        expected += [("lanes", topk), ("logits", 3 * topk)]
    assert bench.draft_model.calls == expected


def test_draft_vocabulary_ids_become_target_ids_before_the_tree_sees_them(device):
    # Eight draft ids; the offsets map id i to target id 2 i + 1.
    bench = Bench(device, config_of(2, 3, 6), d2t=[i + 1 for i in range(8)])
    (tokens,) = bench.draft_behind([[3, 1, 4]]).tokens.tolist()
    assert len(tokens) == 6
    assert all(token % 2 == 1 and 1 <= token <= 15 for token in tokens[1:])
    row = bench.model.draft_logits[state_of([3, 1, 4]), :8]
    assert tokens[1] == 2 * int(row.argmax()) + 1


def after_verify(bench: Bench, sequences: list[list[int]], accepted: list[list[int]]) -> Candidates:
    """`draft` behind a verify step that kept the tokens `accepted`; rows behind them hold rubbish."""
    nodes, committed = bench.config.num_nodes, [len(tokens) - 1 for tokens in sequences]
    predict = torch.full((len(sequences), nodes), -1, dtype=torch.int32, device=bench.device)
    features = torch.full((len(sequences), nodes, 2), 7.0, device=bench.device)
    for request, (tokens, kept) in enumerate(zip(sequences, accepted, strict=True)):
        for i, token in enumerate(kept):
            predict[request, i] = token
            state = state_of([*tokens, *kept[:i]])
            features[request, i] = torch.tensor([state, len(tokens) - 1 + i])
    lens = torch.tensor([len(kept) for kept in accepted], dtype=torch.int32, device=bench.device)
    rows = [[length + i for i in range(nodes)] for length in committed]
    positions = torch.tensor(rows, device=bench.device)
    return bench.eagle.draft(bench.batch(committed), predict, lens, features, positions)


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), TREES)
def test_step_0_takes_the_path_rows_and_drafts_from_the_last_accepted_one(device, topk, num_steps, num_nodes):
    # Bug A9: with N unequal to S + 1, step 0 must not take N rows. Bug A2: unequal accepted lengths.
    bench = Bench(device, config_of(topk, num_steps, num_nodes))
    width = min(num_steps + 1, num_nodes)
    sequences = random_sequences(5, 3)
    accepted = [[5], [5, 3, 8, 2, 9, 1, 4, 7, 6, 0, 2][:width], [11, 12][:width]]
    drafted = after_verify(bench, sequences, accepted)
    assert bench.draft_model.calls[0] == ("chain", width)
    assert [call for call in bench.draft_model.calls[1:] if call[0] == "chain"] == []
    full = [[*tokens, *kept] for tokens, kept in zip(sequences, accepted, strict=True)]
    check_trees(drafted, [bench.expected_tree(tokens) for tokens in full])
    # The draft cache holds the accepted rows: the token that follows, and the state behind it.
    for slot, (before, tokens) in enumerate(zip(sequences, full, strict=True)):
        for position in range(len(before) - 1, len(tokens) - 1):
            row = bench.draft_model.cache.read(slot, position)
            assert row == (tokens[position + 1], state_of(tokens[: position + 2]))


def test_a_chain_drafts_the_same_behind_a_verify_step(device):
    bench = Bench(device, config_of(1, 4, 5))
    sequences, accepted = random_sequences(6, 3), [[1, 2, 3, 4, 5], [6], [7, 8]]
    drafted = after_verify(bench, sequences, accepted)
    full = [[*tokens, *kept] for tokens, kept in zip(sequences, accepted, strict=True)]
    assert drafted.tokens.tolist() == [bench.expected_chain(tokens) for tokens in full]
    assert bench.draft_model.calls[0] == ("chain", 5)


def test_lanes_are_active_exactly_while_a_lane_forward_runs(device):
    bench = Bench(device, config_of(4, 4, 16))
    bench.draft_behind(random_sequences(7, 2))
    lanes = bench.draft_model.lanes
    assert lanes is not None and not lanes.active
    # From now on the toy head checks `active` in every call, step 0 and scoring included.
    after_verify(bench, random_sequences(8, 2), [[1], [2, 3]])
    assert {name for name, _ in bench.draft_model.calls} == {"chain", "lanes", "logits"}
    assert not lanes.active


def tree_classes() -> list[type]:
    """Every class that trtllm_tree.tree defines."""
    names = [info.name for info in pkgutil.iter_modules(trtllm_tree.tree.__path__, "trtllm_tree.tree.")]
    modules = [importlib.import_module(name) for name in names]
    return [
        cls
        for module in modules
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__
    ]


def test_topk_1_makes_no_object_of_the_tree_package(device, monkeypatch):
    classes = tree_classes()
    assert {cls.__name__ for cls in classes} >= {
        "DraftTree",
        "DraftedTree",
        "FutureParentMap",
        "TreeDraftInputs",
        "TreeSpec",
        "TreeVerifyBatch",
    }

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError(f"a {type(self).__name__} was made")

    for cls in classes:
        monkeypatch.setattr(cls, "__init__", refuse)
    bench = Bench(device, config_of(1, 3, 4))
    after_verify(bench, random_sequences(9, 2), [[1, 2], [3]])
    with pytest.raises(AssertionError, match="was made"):
        Bench(device, config_of(2, 3, 4))
