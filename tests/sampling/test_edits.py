"""`LogitEdits` against a plain Python oracle that walks to every node, and what its slots and plans promise."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.oracles import trees
from tests.oracles.edited_logits import edited_logits
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.sampling.edits import EditKind, LogitEdits
from trtllm_tree.sampling.logprobs import TargetLogprobs
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

NUM_SLOTS, MAX_BATCH, VOCAB = 6, 5, 75
STOPS = [3, 4]
# Words whose tokens a window of few tokens often has.
WORDS = [(7,), (5, 6), (6, 5), (5, 5, 6), (6, 6), (5, 6, 5, 8), (8, 5, 5, 5, 5, 5)]
# By pool slot; the last but one asks for nothing, the last is the pad slot.
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.9},
    {"min_tokens": 9, "logit_bias": {5: 2.5, 3: 1.0, VOCAB - 1: -4.0}},
    {"bad_words": WORDS},
    {"bad_words": WORDS[3:], "frequency_penalty": -1.5, "min_tokens": 7, "logit_bias": {6: -3.25}},
    {},
]
PROMPTS = [[5, 5, 9, 20], [6], [5, 6, 5], [8, 8, 5, 6, 7, 30], [11, 12]]


def make_edits(max_rows: int, device: str) -> LogitEdits:
    edits = LogitEdits(NUM_SLOTS, max_rows, VOCAB, device=device)
    for slot in range(len(OPTIONS)):
        reset(edits, slot, slot)
    return edits


def reset(edits: LogitEdits, slot: int, which: int) -> None:
    options = dict(OPTIONS[which])
    words = options.pop("bad_words", [])
    edits.reset(slot, SamplingParams(**options), PROMPTS[which], stop_ids=STOPS, bad_words=words)


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Few different ones, so that they repeat and make up bad words."""
    return [rng.choice([3, 5, 5, 5, 6, 6, 8, VOCAB - 1]) for _ in range(count)]


def expected_row(row: torch.Tensor, which: int, output: list[int], allowed: set[int] | None) -> list[float]:
    if which >= len(OPTIONS):
        return row.tolist()
    options = {"stop_ids": STOPS, "allowed": allowed, **OPTIONS[which]}
    return edited_logits(row.tolist(), PROMPTS[which], output, **options)


def tree_of(parents: list[list[int]], device: str) -> TreeVerifyBatch:
    def tensor(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return TreeVerifyBatch(
        parents=tensor(parents, torch.int32),
        depths=tensor([trees.depths(each) for each in parents], torch.int32),
        ancestor_mask=tensor([trees.mask_words(each) for each in parents], torch.int64),
    )


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20, 66])
def test_every_node_is_edited_by_what_was_committed_and_its_ancestors(device, num_nodes, shape):
    rng = random.Random(num_nodes)
    generator = torch.Generator().manual_seed(num_nodes)
    edits = make_edits(MAX_BATCH * num_nodes, device)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for slots in ([4, 0, 2, 1, 3], [3, 5], [0, 5], [2], [1, 4, 2]):
        kept = [(slot, some_tokens(rng, rng.randrange(1, 5))) for slot in slots if slot < 5]
        edits.commit(kept)
        for slot, tokens in kept:
            outputs[slot] += tokens
        # The pad slot's window is anything.
        roots = [outputs[slot][-1] if slot < 5 else 0 for slot in slots]
        tokens = [[root, *some_tokens(rng, num_nodes - 1)] for root in roots]
        parents = [
            trees.chain(num_nodes) if shape == "chain" else trees.random_tree(rng, num_nodes) for _ in slots
        ]
        starts = [len(PROMPTS[slot]) + len(outputs[slot]) - 1 if slot < 5 else 0 for slot in slots]
        depths = torch.tensor([trees.depths(each) for each in parents])
        logits = 4 * torch.randn(len(slots) * num_nodes, VOCAB, generator=generator)
        got = logits.clone().to(device)
        edits.plan(slots)
        edits.apply(
            got,
            torch.tensor(slots, device=device),
            torch.tensor(tokens, dtype=torch.int32, device=device),
            None if shape == "chain" else tree_of(parents, device),
            (torch.tensor(starts).unsqueeze(1) + depths).to(device),
        )
        for index, slot in enumerate(slots):
            for node in range(num_nodes):
                row = index * num_nodes + node
                path = trees.path_to(parents[index], node)[1:]
                output = (outputs[slot] if slot < 5 else []) + [tokens[index][each] for each in path]
                want = expected_row(logits[row], slot, output, None)
                torch.testing.assert_close(got[row].cpu(), torch.tensor(want), rtol=1e-6, atol=1e-5)
                if slot >= 4:
                    assert torch.equal(got[row].cpu(), logits[row]), "a row of nobody's was touched"


def test_one_row_behind_a_prompt_and_in_plain_decoding(device):
    rng = random.Random(5)
    edits = make_edits(MAX_BATCH, device)
    slots = [3, 0, 4, 2, 1]
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    edits.plan(slots)
    for step in range(12):
        logits = 4 * torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(step))
        got = logits.clone().to(device)
        positions = torch.tensor([[len(PROMPTS[slot]) + step - 1] for slot in slots], device=device)
        edits.apply(got, torch.tensor(slots, device=device), None, None, positions)
        for row, slot in enumerate(slots):
            want = torch.tensor(expected_row(logits[row], slot, outputs[slot], None))
            torch.testing.assert_close(got[row].cpu(), want, rtol=1e-6, atol=1e-5)
        kept = [(slot, some_tokens(rng, 1)) for slot in slots]
        edits.commit(kept)
        for slot, tokens in kept:
            outputs[slot] += tokens


def test_a_tree_shaped_like_a_chain_is_edited_bit_for_bit_like_the_chain(device):
    edits = make_edits(5 * 7, device)
    rng, slots = random.Random(3), [0, 1, 2, 3, 4]
    edits.plan(slots)
    tokens = torch.tensor([some_tokens(rng, 7) for _ in slots], dtype=torch.int32, device=device)
    edits.commit([(slot, [int(tokens[slot, 0])]) for slot in slots])
    positions = torch.arange(7, device=device).repeat(5, 1)
    logits = torch.randn(5 * 7, VOCAB, device=device)
    both = [logits.clone(), logits.clone()]
    for rows, tree in zip(both, (None, tree_of([trees.chain(7)] * 5, device)), strict=True):
        edits.apply(rows, torch.tensor(slots, device=device), tokens, tree, positions)
    assert torch.equal(*both)


@pytest.mark.parametrize("vocab", [20, 64, 75])
def test_the_bitmask_is_applied_last_and_to_its_slots_only(device, vocab):
    edits = LogitEdits(3, 4, vocab, device=device)
    edits.reset(0, SamplingParams(logit_bias={3: 1e6}), [1])
    edits.reset(1, SamplingParams(), [1])
    allowed = [{0, vocab - 1}, {4}, {5}, set(range(vocab))]
    words = torch.zeros(4, -(-vocab // 32), dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= 1 << token % 32
    edits.bitmask.copy_(words - 2**32 * (words >= 2**31))
    edits.use_bitmask(0, True)
    logits = torch.randn(4, vocab)
    for slots, used in (([0, 1], {0}), ([2, 1], set()), ([1, 0], {1})):
        got = logits.clone().to(device)
        edits.plan(slots)
        assert edits.kind.bitmask == bool(used)
        tokens = torch.ones(2, 2, dtype=torch.int32, device=device)
        edits.apply(got, torch.tensor(slots, device=device), tokens, None, torch.zeros_like(tokens))
        for row in range(4):
            for token in range(vocab):
                kept = row // 2 not in used or token in allowed[row]
                bias = 1e6 if slots[row // 2] == 0 and token == 3 else 0.0
                want = (logits[row, token] + bias).item() if kept else float("-inf")
                assert got[row, token].item() == want
    edits.reset(0, SamplingParams(), [1])
    edits.plan([0, 1])
    assert edits.kind == EditKind(), "a new request has no grammar until it is said"


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4])
def test_a_slot_forgets_the_request_before(device, shift):
    edits = make_edits(MAX_BATCH, device)
    edits.commit([(slot, [5, 6, 5, 5, 5]) for slot in range(5)])
    takes = [(slot + shift) % 5 for slot in range(5)]
    for slot in range(5):
        reset(edits, slot, takes[slot])
    slots = [0, 1, 2, 3, 4]
    edits.plan(slots)
    logits = 4 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    got = logits.clone().to(device)
    positions = torch.tensor([[len(PROMPTS[takes[slot]]) - 1] for slot in slots], device=device)
    edits.apply(got, torch.tensor(slots, device=device), None, None, positions)
    for slot in slots:
        want = torch.tensor(expected_row(logits[slot], takes[slot], [], None))
        torch.testing.assert_close(got[slot].cpu(), want, rtol=1e-6, atol=1e-5)
    free = takes.index(4)
    assert torch.equal(got[free].cpu(), logits[free]), "a request without edits was edited in a mixed batch"


def test_only_what_a_batch_asks_for_is_planned(device):
    edits = make_edits(MAX_BATCH, device)
    kinds = []
    for slots in ([4], [4, 5], [0, 4], [1], [2, 4], [1, 2], [0, 1, 2, 3]):
        edits.plan(slots)
        kinds.append(edits.kind)
    nothing = EditKind()
    assert kinds[:2] == [nothing, nothing]
    assert kinds[2] == EditKind(penalties=True)
    assert kinds[3] == EditKind(num_entries=16)
    assert kinds[4] == EditKind(num_entries=16, num_words=8, word_len=8)
    assert kinds[5] == EditKind(num_entries=16, num_words=8, word_len=8)
    assert kinds[6] == EditKind(num_entries=16, penalties=True, num_words=8, word_len=8)


def test_nothing_is_allocated_for_requests_without_edits(device):
    edits = LogitEdits(NUM_SLOTS, MAX_BATCH, VOCAB, device=device)
    edits.reset(0, SamplingParams(temperature=1.0, repetition_penalty=1.0, presence_penalty=0.0), [1, 2])
    assert (edits._entries, edits._penalties, edits._words, edits._bitmask) == (None, None, None, None)


class Operands(TorchDispatchMode):
    """Keeps the devices of all tensors of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self.seen.append((str(func), leaf.device.type))
        return out


@pytest.mark.parametrize("shape", ["row", "chain", "tree"])
def test_a_step_brings_nothing_to_the_device_and_reads_nothing_back(shape: str) -> None:
    """Tensors of device meta have no values to read, and no operation may have one of another device."""
    num_nodes = 1 if shape == "row" else 6
    edits = make_edits(5 * num_nodes, "meta")
    logprobs = TargetLogprobs(edits)
    logprobs.reset(0, 5)
    edits.use_bitmask(2, True)
    assert edits.bitmask.device.type == "meta"
    slots = [0, 1, 2, 3, 4]
    edits.plan(slots)
    logprobs.plan(slots)
    assert edits.kind == EditKind(16, True, 8, 8, True) and logprobs.kind == (5, True)
    logits = torch.zeros(5 * num_nodes, VOCAB, device="meta")
    tokens = torch.zeros(5, num_nodes, dtype=torch.int32, device="meta")
    positions = torch.zeros(5, num_nodes, dtype=torch.int64, device="meta")
    tree = tree_of([trees.chain(num_nodes)] * 5, "meta") if shape == "tree" else None
    on_device = torch.tensor(slots, device="meta")
    with Operands() as operands:
        logprobs.keep(logits)
        edits.apply(logits, on_device, None if shape == "row" else tokens, tree, positions)
        logprobs.take(tokens if tree is not None else None, tokens)
    assert {device for _, device in operands.seen} == {"meta"}, operands.seen


def test_raw_logits_are_copied_only_for_a_request_that_is_edited_and_wants_its_own(device) -> None:
    edits = LogitEdits(4, 3, VOCAB, device=device)
    edits.reset(0, SamplingParams(logit_bias={3: 50.0}, repetition_penalty=1.5), [5, 6])
    edits.use_bitmask(1, True)
    edits.bitmask[:] = 1
    logprobs = TargetLogprobs(edits)
    raw = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)).to(device)
    for wants, copies in ((2, False), (0, True), (1, True)):
        for slot in range(4):
            logprobs.reset(slot, 1 if slot == wants else None)
        edits.plan([0, 1, 2])
        logprobs.plan([0, 1, 2])
        logits = raw.clone()
        logprobs.keep(logits)
        assert (logprobs._raw is logits) is not copies
        positions = torch.full((3, 1), 9, device=device)
        edits.apply(logits, torch.tensor([0, 1, 2], device=device), None, None, positions)
        assert not torch.equal(logits[:2], raw[:2])
        taken = logprobs.take(None, torch.full((3, 1), 7, dtype=torch.int32, device=device))
        assert taken is not None
        expected = raw[wants].log_softmax(dim=0)
        assert taken[0][wants, 0, 0].item() == pytest.approx(expected[7].item(), abs=1e-5)
        assert taken[2][wants, 0].item() == 1 + (raw[wants] > raw[wants, 7]).sum().item()


def test_a_row_that_is_not_a_number_stays_one(device):
    edits = make_edits(1, device)
    for slot in (0, 1, 2, 3):
        rows = torch.full((1, VOCAB), torch.nan, device=device)
        edits.plan([slot])
        edits.apply(rows, torch.tensor([slot], device=device), None, None, torch.tensor([[0]], device=device))
        assert rows.isnan().any()
