"""A toy language model with its draft head and a paged cache, small enough to be followed in plain Python.

The next-token logits depend on the whole sequence through a small state: state' = (31 state + 7 token + 11)
mod 1009. The state takes the part of K/V, features and hidden rows, so one wrongly moved row, mask bit or
position changes the output or trips an assert. `greedy` and `best_children` say what must come out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trtllm_tree.ports import RoundBatch
from trtllm_tree.tree.lanes import TreeDraftInputs

NUM_STATES, VOCAB = 1009, 17
NUM_SLOTS, MAX_BATCH = 5, 5
PAD_SLOT = NUM_SLOTS - 1
PAGES_PER_SLOT = 24
DRAFT_PAGE_SIZE = 8


def advance(state: Any, token: Any) -> Any:
    """The state behind one more token; works on ints and on tensors."""
    return (31 * state + 7 * token + 11) % NUM_STATES


def state_of(tokens: Sequence[int]) -> int:
    """The state of a whole sequence."""
    state = 0
    for token in tokens:
        state = advance(state, token)
    return state


class ToyModel:
    """Next-token tables by state. The draft's is the target's with noise: right now and then."""

    def __init__(self, device: str, *, noise: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(0)
        target = 2.0 * torch.randn(NUM_STATES, VOCAB, generator=generator)
        draft = target + noise * torch.randn(NUM_STATES, VOCAB, generator=generator)
        self.target_logits, self.draft_logits = target.to(device), draft.to(device)
        self._target, self._draft = target.tolist(), draft.tolist()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What plain decoding generates."""
        tokens = list(prompt)
        for _ in range(count):
            row = self._target[state_of(tokens)]
            tokens.append(row.index(max(row)))
        return tokens[len(prompt) :]

    def best_children(self, tokens: Sequence[int]) -> list[tuple[float, int]]:
        """The draft head's (log-probability, token) behind a sequence, best first."""
        row = self._draft[state_of(tokens)]
        total = math.log(sum(math.exp(logit) for logit in row))
        return sorted(((logit - total, token) for token, logit in enumerate(row)), reverse=True)


class PagedRows:
    """One cache group: rows of two numbers in pages that are handed out in no order; page 0 is the dummy."""

    def __init__(self, device: str, page_size: int, dtype: torch.dtype, num_layers: int) -> None:
        self.page_size = page_size
        pages = 1 + PAD_SLOT * PAGES_PER_SLOT
        self.pool = torch.full((num_layers, pages, 1, page_size, 2), math.nan, dtype=dtype, device=device)
        table = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(page_size))
        self.table = torch.zeros(NUM_SLOTS, PAGES_PER_SLOT, dtype=torch.int32, device=device)
        self.table[:PAD_SLOT] = table.view(PAD_SLOT, PAGES_PER_SLOT)
        self._host_table = self.table.tolist()

    def slot(self, pool_slot: int, position: int) -> int:
        """The KV slot of a request's position."""
        return (
            self._host_table[pool_slot][position // self.page_size] * self.page_size
            + position % self.page_size
        )

    def write(self, slot: int, row: tuple[float, float]) -> None:
        self.pool[:, slot // self.page_size, 0, slot % self.page_size] = torch.tensor(row).to(self.pool)

    def read(self, pool_slot: int, position: int) -> tuple[int, int]:
        """The row of a request's position; every layer must hold the same."""
        slot = self.slot(pool_slot, position)
        rows = self.pool[:, slot // self.page_size, 0, slot % self.page_size].tolist()
        assert all(row == rows[0] for row in rows), f"layers disagree at position {position}"
        return int(rows[0][0]), int(rows[0][1])


class ToyDraft:
    """`ports.DraftModel`: a hidden row is (state, position); a draft-cache row is (token, state).

    Records every call as (name, rows a request). A lane checks that the cache rows which its mask lets it see
    spell exactly the path that its hidden row came along, unless a test turns `checks_paths` off.
    """

    hidden_size, dtype = 2, torch.float64

    def __init__(self, model: ToyModel, cache: PagedRows, d2t: torch.Tensor | None = None) -> None:
        self.model, self.cache, self.d2t = model, cache, d2t
        self.calls: list[tuple[str, int]] = []
        self.lanes: TreeDraftInputs | None = None
        self.checks_paths = True

    def _call(self, name: str, rows: int) -> None:
        self.calls.append((name, rows))
        if self.lanes is not None:
            assert self.lanes.active == (name == "lanes"), f"`active` is {self.lanes.active} in {name}"

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, slots: list[list[int]]) -> torch.Tensor:
        assert int(token_ids.min()) >= 0 and int(token_ids.max()) < VOCAB, "no token of the vocabulary"
        state = advance(hidden[..., 0].long(), token_ids.long())
        for request, row in enumerate(slots):
            for i, slot in enumerate(row):
                self.cache.write(slot, (token_ids[request, i].item(), state[request, i].item()))
        return torch.stack([state.double(), hidden[..., 1] + 1], dim=-1)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features.double()

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._call("chain", token_ids.shape[1])
        slots = []
        for pool_slot, row in zip(batch.slots.tolist(), positions.tolist(), strict=True):
            assert row == list(range(row[0], row[0] + len(row))), "a chain's positions are consecutive"
            # Step 0 has rows behind the accepted ones, whose hidden rows may be anything.
            assert len(row) > 1 or row == hidden[len(slots), :, 1].tolist(), (
                "a chain step's position moves on"
            )
            slots.append([self.cache.slot(pool_slot, position) for position in row])
        out = self._forward(token_ids, hidden, slots)
        return out if last_rows is None else out.view(-1, 1, 2)[last_rows]

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        self.lanes = lanes
        self._call("lanes", token_ids.shape[1])
        slots = lanes.slots(step, token_ids.shape[0]).tolist()
        positions = lanes.positions(step, len(slots)).tolist()
        out = self._forward(token_ids, hidden, slots)
        for request, pool_slot in enumerate(batch.slots.tolist()):
            frontier = lanes.frontier[request].item()
            assert positions[request] == [frontier + step - 1] * len(slots[request])
            if pool_slot == PAD_SLOT or not self.checks_paths:
                continue
            assert positions[request] == hidden[request, :, 1].tolist()
            _, root_state = self.cache.read(pool_slot, frontier - 1)
            for lane, words in enumerate(lanes.lane_mask[request].tolist()):
                columns = [
                    64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1
                ]
                state = root_state
                for column in columns:
                    state = advance(state, self.cache.read(pool_slot, frontier + column)[0])
                assert len(columns) == step and state == out[request, lane, 0].item(), (
                    "a lane sees another path"
                )
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._call("logits", hidden.shape[0])
        logits = self.model.draft_logits[hidden[:, 0].long() % NUM_STATES]
        return logits if self.d2t is None else logits[:, : len(self.d2t)].contiguous()
