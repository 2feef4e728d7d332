"""A host that runs a `SpecRound` over the toy model: two target cache groups, one draft cache.

The target reads its prefix's state from the paged cache and folds each node's root path onto it, so that the
round's compaction, masks and positions decide what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.toy import (
    DRAFT_PAGE_SIZE,
    MAX_BATCH,
    NUM_SLOTS,
    PAD_SLOT,
    VOCAB,
    PagedRows,
    ToyDraft,
    ToyModel,
    advance,
    state_of,
)
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, TreeParts, VerifyWindow
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.tree.future import FutureParentMap
from trtllm_tree.tree.spec import TreeSpec

PAGE_SIZES = (4, 16)


class ToyPool:
    """`ports.KVPool` over the target groups."""

    def __init__(self, groups: Sequence[PagedRows]) -> None:
        self._groups = groups

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        return [list(group.pool) for group in self._groups]


class ToyHost:
    """Runs a `SpecRound` over the toy model, pads a batch on request, and checks the caches."""

    def __init__(self, config: SpeculativeConfig, device: str, *, noise: float = 2.0) -> None:
        self.config, self.device, self.model = config, device, ToyModel(device, noise=noise)
        nodes = config.num_nodes
        self.groups = [
            PagedRows(device, PAGE_SIZES[0], torch.float32, 2),
            PagedRows(device, PAGE_SIZES[1], torch.float64, 1),
        ]
        self.draft = ToyDraft(self.model, PagedRows(device, DRAFT_PAGE_SIZE, torch.float64, 1))
        # A third feature that nobody reads makes the rows' width odd.
        self.hidden = torch.full((MAX_BATCH * nodes, 3), math.nan, device=device)
        tree = None
        if config.is_tree:
            tree = TreeParts(
                spec=TreeSpec(MAX_BATCH, nodes, self.hidden),
                parents=FutureParentMap(NUM_SLOTS, nodes, device),
                compactor=KVCompactor(ToyPool(self.groups)),
            )
        self.round = SpecRound(
            config,
            drafter=Eagle(self.draft, config, max_batch=MAX_BATCH, vocab_size=VOCAB, device=device),
            sampler=GreedySampler(MAX_BATCH, nodes, device=device, tree=config.is_tree),
            hidden=self.hidden,
            num_slots=NUM_SLOTS,
            tree=tree,
        )
        self.sequences: dict[int, list[int]] = {}
        self.committed = {PAD_SLOT: 0}

    def batch(self, slots: Sequence[int]) -> RoundBatch:
        """A round's batch over pool slots; the pad slot may appear any number of times."""
        lens = [self.committed[slot] for slot in slots]
        index = torch.tensor(list(slots), device=self.device)
        windows = [
            [
                [group.slot(s, length + i) for i in range(self.config.num_nodes)]
                for s, length in zip(slots, lens, strict=True)
            ]
            for group in self.groups
        ]
        return RoundBatch(
            slots=index,
            committed_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            write_slots=torch.tensor(windows, dtype=torch.int32, device=self.device),
            draft_page_table=self.draft.cache.table[index],
            draft_page_size=DRAFT_PAGE_SIZE,
            max_committed_len=max(lens),
        )

    def prefill(self, prompts: dict[int, list[int]]) -> None:
        """Put prompts into the caches and draft their first windows."""
        last, first, frontier = [], [], []
        for slot, prompt in prompts.items():
            self.round.reset(slot)
            tokens = [*prompt, *self.model.greedy(prompt, 1)]
            self.sequences[slot], self.committed[slot] = tokens, len(prompt)
            for position in range(len(prompt)):
                state = state_of(tokens[: position + 1])
                for group in self.groups:
                    group.write(group.slot(slot, position), (state, position))
                row = (tokens[position + 1], state_of(tokens[: position + 2]))
                self.draft.cache.write(self.draft.cache.slot(slot, position), row)
            last.append([state_of(tokens), len(prompt)])
            first.append(tokens[-1])
            frontier.append(len(prompt))
        ints = {"dtype": torch.int32, "device": self.device}
        self.round.start(
            self.batch(list(prompts)),
            torch.tensor(last, dtype=torch.float64, device=self.device),
            torch.tensor(first, **ints),
            torch.tensor(frontier, **ints),
        )

    def forward(self, batch: RoundBatch, window: VerifyWindow) -> torch.Tensor:
        """The target's logits [B*N, V] of a window: writes its K/V by slot and its features by row."""
        nodes, rows = self.config.num_nodes, []
        positions, tokens = window.positions.tolist(), window.tokens.tolist()
        assert min(map(min, tokens)) >= 0, "a window holds tokens only"
        causal = [[list(range(node + 1)) for node in range(nodes)]] * len(tokens)
        paths = causal if window.tree is None else _paths(window.tree.ancestor_mask)
        for request, (slot, length) in enumerate(
            zip(batch.slots.tolist(), batch.committed_lens.tolist(), strict=True)
        ):
            prefix = {group.read(slot, length - 1) for group in self.groups} if length else {(0, -1)}
            assert len(prefix) == 1, "the cache groups disagree"
            for node, path in enumerate(paths[request]):
                state = prefix.copy().pop()[0]
                for ancestor in path:
                    state = advance(state, tokens[request][ancestor])
                position = positions[request][node]
                assert position == length + len(path) - 1, "position follows depth"
                for group, write_slots in zip(self.groups, batch.write_slots, strict=True):
                    group.write(int(write_slots[request, node]), (state, position))
                rows.append((state, position, 0))
        self.hidden[: len(rows)] = torch.tensor(rows, dtype=torch.float32, device=self.device)
        return self.model.target_logits[[row[0] for row in rows]]

    def run_round(
        self, slots: Sequence[int], *, pads: int = 0, pad_logits: torch.Tensor | None = None
    ) -> Accepted:
        """One round of requests, pad rows last; commits what was kept."""
        batch = self.batch([*slots, *[PAD_SLOT] * pads])
        window = self.round.open_window(batch)
        logits = self.forward(batch, window)
        if pad_logits is not None:
            logits[len(slots) * self.config.num_nodes :] = pad_logits
        accepted = self.round.close_window(batch, window, logits)
        for request, slot in enumerate(slots):
            kept = int(accepted.accept_len[request])
            self.sequences[slot] += accepted.predict[request, :kept].tolist()
            self.committed[slot] += kept
        return accepted

    def check_caches(self) -> None:
        """Every committed row holds its own sequence, in the target's groups and in the draft cache."""
        for slot, tokens in self.sequences.items():
            for position in range(self.committed[slot]):
                state = state_of(tokens[: position + 1])
                for group in self.groups:
                    assert group.read(slot, position) == (state, position), f"slot {slot} position {position}"
                assert self.draft.cache.read(slot, position) == (
                    tokens[position + 1],
                    advance(state, tokens[position + 1]),
                )


def _paths(ancestor_mask: torch.Tensor) -> list[list[list[int]]]:
    """Per request and node, the nodes whose bit is set, in rising order: root first."""
    return [
        [
            [64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1]
            for words in request
        ]
        for request in ancestor_mask.tolist()
    ]
