"""Rounds over a toy model: the output is plain decoding's, in fixed buffers, whatever else is in the batch.

Touches invariants I1, I4, I8 and I13 from the round's side.
"""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.oracles import trees
from tests.toy import MAX_BATCH, NUM_SLOTS, PAD_SLOT, VOCAB
from tests.toy_host import ToyHost
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.sampling.base import Accepted

# (K, S, N): chains, trees narrower and wider than a path, a single step, more than one mask word.
CHAINS = [(1, 1, 2), (1, 4, 5)]
TREES = [(2, 2, 3), (2, 4, 13), (3, 1, 4), (4, 3, 16), (4, 2, 20)]
PROMPTS = {0: [3, 1, 4, 1, 5], 1: [2], 2: [16] * 18, 3: [9, 2, 6]}


def make_host(device: str, topk: int, num_steps: int, num_nodes: int, **options: Any) -> ToyHost:
    config = SpeculativeConfig(
        tree_topk=topk, num_steps=num_steps, num_nodes=num_nodes, speculative_model="head"
    )
    host = ToyHost(config, device, **options)
    host.prefill(PROMPTS)
    return host


def check_output(host: ToyHost) -> None:
    for slot, tokens in host.sequences.items():
        prompt = PROMPTS[slot]
        assert tokens[len(prompt) :] == host.model.greedy(prompt, len(tokens) - len(prompt))
    host.check_caches()


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), CHAINS + TREES)
def test_every_round_keeps_what_plain_decoding_would_say(device, topk, num_steps, num_nodes):
    rng = random.Random(num_nodes)
    host = make_host(device, topk, num_steps, num_nodes)
    lengths = set()
    for _ in range(10):
        # Other requests in another order each round: everything must be found by its pool slot.
        slots = rng.sample(range(PAD_SLOT), rng.randrange(1, PAD_SLOT + 1))
        accepted = host.run_round(slots, pads=rng.randrange(2))
        lengths |= set(accepted.accept_len[: len(slots)].tolist())
        check_output(host)
    assert max(lengths) <= host.config.max_path_len
    assert len(lengths) > 1, "the rounds must differ to mean anything"


def test_a_perfect_drafter_is_accepted_in_full(device):
    # With S <= 2 and every candidate kept, a tree holds its best child's best child.
    for shape, length in (((1, 4, 5), 5), ((2, 2, 7), 3)):
        host = make_host(device, *shape, noise=0.0)
        for _ in range(3):
            assert host.run_round([0, 1, 2, 3]).accept_len.tolist() == [length] * 4
        check_output(host)


def test_a_tree_that_contains_the_chain_never_keeps_less(device):
    # Bug A1. Both start each round alike; the tree keeps all candidates, the chain's included.
    tree = make_host(device, 3, 2, 13)
    chain = make_host(device, 1, 2, 3)
    gains = 0
    for _ in range(8):
        wide = tree.run_round([0, 1]).accept_len.tolist()
        narrow = chain.run_round([0, 1]).accept_len.tolist()
        assert all(w >= n for w, n in zip(wide, narrow, strict=True))
        gains += sum(wide) - sum(narrow)
        restart = {slot: tree.sequences[slot][:-1] for slot in (0, 1)}
        chain.prefill(restart)
        tree.prefill(restart)
    assert gains > 0


class Recorder:
    """A `RoundObserver` that copies what it sees."""

    def __init__(self) -> None:
        self.drafted: list[tuple[list[int], list, list | None]] = []
        self.verified: list[tuple[list[int], list]] = []
        self.addresses: list[dict[str, int]] = []

    def on_drafted(self, slots: torch.Tensor, candidates: Candidates) -> None:
        parents = None if candidates.parents is None else candidates.parents.tolist()
        self.drafted.append((slots.tolist(), candidates.tokens.tolist(), parents))
        self.addresses.append(addresses_of(candidates))

    def on_verified(self, slots: torch.Tensor, accepted: Accepted) -> None:
        self.verified.append((slots.tolist(), accepted.accept_len.tolist()))
        self.addresses.append(addresses_of(accepted))


def addresses_of(record: Any) -> dict[str, int]:
    """The address of every tensor of a dataclass, nested ones included."""
    found = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value.data_ptr()
        elif hasattr(value, "__dataclass_fields__"):
            found |= {f"{field.name}.{name}": address for name, address in addresses_of(value).items()}
    return found


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 4, 5), (4, 3, 16)])
def test_buffers_keep_their_addresses_over_rounds(device, topk, num_steps, num_nodes):
    host = make_host(device, topk, num_steps, num_nodes)
    windows = []
    for slots in ([0, 1, 2, 3], [2], [3, 0], [1, 0, 3, 2]):
        recorder = host.round.observer = Recorder()
        batch = host.batch(slots)
        window = host.round.open_window(batch)
        logits = host.forward(batch, window)
        host.round.close_window(batch, window, logits)
        maps = {"input map": host.round.future_input_map.data_ptr()}
        if host.round.tree is not None:
            maps["parents"] = host.round.tree.parents.parents.data_ptr()
        verified, drafted = recorder.addresses
        windows.append([addresses_of(window), verified, drafted, maps])
    assert all(addresses == windows[0] for addresses in windows)
    assert len(windows[0][0]) == (2 if topk == 1 else 5)


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 3, 4), (2, 3, 6)])
def test_a_round_runs_in_the_order_of_its_picture(device, monkeypatch, topk, num_steps, num_nodes):
    host = make_host(device, topk, num_steps, num_nodes)
    events: list[str] = []

    def spy(owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    spy(host.round.sampler, "verify", "verify")
    spy(host.round.drafter, "draft", "draft")
    spy(host.draft, "fuse", "step 0")
    spy(host.draft, "lane_rows", "lanes")
    if topk > 1:
        tree = host.round.tree
        spy(tree.spec, "load_step", "load")
        spy(tree.compactor, "compact_verify_window", "compact KV")
        spy(tree.spec, "compact_rows", "compact rows")
        spy(host.round.drafter._tree, "select", "select")
    batch = host.batch([0, 1])
    window = host.round.open_window(batch)
    events.append("target forward")
    logits = host.forward(batch, window)
    future = host.round.future_input_map.clone()
    host.round.close_window(batch, window, logits)
    if topk == 1:
        assert events == ["target forward", "verify", "draft", "step 0"]
    else:
        assert events == [
            "load",
            "target forward",
            "verify",
            "compact KV",
            "compact rows",
            "draft",
            "step 0",
            *["lanes"] * (num_steps - 1),
            "select",
        ]
    assert not torch.equal(host.round.future_input_map, future)


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 4, 5), (4, 3, 16)])
def test_the_next_windows_are_left_by_pool_slot(device, topk, num_steps, num_nodes):
    host = make_host(device, topk, num_steps, num_nodes)
    recorder = host.round.observer = Recorder()
    before = host.round.future_input_map.clone()
    accepted = host.run_round([3, 1])
    ((slots, tokens, parents),) = recorder.drafted
    assert slots == [3, 1] and recorder.verified == [([3, 1], accepted.accept_len.tolist())]
    after = host.round.future_input_map
    assert after[[3, 1]].tolist() == tokens
    assert torch.equal(after[[0, 2, PAD_SLOT]], before[[0, 2, PAD_SLOT]])
    # Each window starts at the last token that its request kept.
    assert [row[0] for row in tokens] == [host.sequences[slot][-1] for slot in slots]
    if parents is not None:
        assert host.round.tree.parents.parents[[3, 1]].tolist() == parents
        assert parents[0] != trees.chain(num_nodes)


def test_a_reset_slot_holds_dummy_tokens_and_the_chain(device):
    host = make_host(device, 4, 3, 16)
    host.run_round([0, 1, 2, 3])
    kept = [
        tensor[[0, 1, 3]].clone() for tensor in (host.round.future_input_map, host.round.tree.parents.parents)
    ]
    host.round.reset(2)
    assert host.round.future_input_map[2].tolist() == [0] * 16
    assert host.round.tree.parents.parents[2].tolist() == trees.chain(16)
    now = [tensor[[0, 1, 3]] for tensor in (host.round.future_input_map, host.round.tree.parents.parents)]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 4, 5), (2, 4, 13), (4, 2, 20)])
@pytest.mark.parametrize("pad_token", [None, 0, VOCAB - 1])
def test_pad_rows_stay_inert(device, topk, num_steps, num_nodes, pad_token):
    """Bugs C1, C2. `pad_token` is the target's choice in pad rows: the dummy token, another, NaN (None)."""
    padded, alone = (make_host(device, topk, num_steps, num_nodes) for _ in range(2))
    row = torch.full((VOCAB,), float("nan"))
    if pad_token is not None:
        row = torch.nn.functional.one_hot(torch.tensor(pad_token), VOCAB).float()
    for slots in ([0, 1, 2], [3], [1], [2, 0, 3], [0]):
        pads = MAX_BATCH - len(slots)
        accepted = padded.run_round(slots, pads=pads, pad_logits=row.to(device))
        expected = alone.run_round(slots)
        for field in ("predict", "accept_len"):
            assert torch.equal(getattr(accepted, field)[: len(slots)], getattr(expected, field))
        # Whatever pad rows wrote lies in the dummy page or their own map row.
        for one, other in zip(
            [*padded.groups, padded.draft.cache], [*alone.groups, alone.draft.cache], strict=True
        ):
            torch.testing.assert_close(one.pool[:, 1:], other.pool[:, 1:], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(padded.round.future_input_map[:PAD_SLOT], alone.round.future_input_map[:PAD_SLOT])
        if topk > 1:
            maps = [host.round.tree.parents.parents[:PAD_SLOT] for host in (padded, alone)]
            assert torch.equal(*maps)
    check_output(padded)


def test_a_dummy_window_may_be_kept_beyond_any_drafted_path(device):
    # A reset slot is a chain of N > S + 1 nodes. Should its tokens be right, all are kept.
    host = make_host(device, 2, 2, 7)
    assert host.config.max_path_len == 3
    # Step 0 gives the draft cache the first rows of such a path only, which costs acceptance alone.
    host.draft.checks_paths = False
    host.round.reset(3)
    root = host.sequences[3][-1]
    lucky = [root, *host.model.greedy(host.sequences[3], 6)]
    host.round.future_input_map[3] = torch.tensor(lucky, dtype=torch.int32, device=device)
    assert host.run_round([0, 3]).accept_len[1] == 7
    for _ in range(3):
        host.run_round([3, 0])
    for slot in (0, 3):
        tokens, prompt = host.sequences[slot], PROMPTS[slot]
        assert tokens[len(prompt) :] == host.model.greedy(prompt, len(tokens) - len(prompt))


def test_a_pad_row_keeps_its_place_at_position_zero(device):
    host = make_host(device, 2, 4, 13)
    for slots in ([0, 1, 2, 3], [2]):
        batch = host.batch([*slots, *[PAD_SLOT] * (MAX_BATCH - len(slots))])
        window = host.round.open_window(batch)
        for row in window.positions[len(slots) :].tolist():
            assert row[0] == 0 and max(row) < 13
        host.round.close_window(batch, window, host.forward(batch, window))


def test_tree_parts_and_topk_must_agree(device):
    host = make_host(device, 2, 2, 3)
    chain = SpeculativeConfig(tree_topk=1, num_steps=2, speculative_model="head")
    parts = {"drafter": host.round.drafter, "sampler": host.round.sampler, "hidden": host.hidden}
    with pytest.raises(AssertionError, match="topk > 1"):
        type(host.round)(chain, **parts, num_slots=NUM_SLOTS, tree=host.round.tree)
    with pytest.raises(AssertionError, match="topk > 1"):
        type(host.round)(host.config, **parts, num_slots=NUM_SLOTS, tree=None)
