"""One request's draft tree in plain Python: EAGLE-2 growth and selection, candidate by candidate.

The slow third derivation that the `draft_tree_*` ops and DraftTree are tested against. It keeps every
candidate in a list, finds ancestors by walking parents and numbers nodes by recursion. It must not import the
package under test, nor torch.

    oracle = DraftTreeOracle(topk, num_steps)
    for each draft step: oracle.grow(scores, tokens); compare oracle.entries, .lanes[-1], .lane_masks()
    nodes = oracle.select(num_nodes, root_token)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def float32(value: float) -> float:
    """`value` rounded to float32. A sum of two float32 in float64, rounded once, is their float32 sum."""
    return ctypes.c_float(value).value


@dataclass(frozen=True)
class Entry:
    """A scored candidate: its cumulative log-probability, token, and parent's entry id (-1: the root)."""

    score: float
    token: int
    parent: int


@dataclass(frozen=True)
class Node:
    """A selected node: token, parent's node number, score and entry id; the root has parent and entry -1."""

    token: int
    parent: int
    score: float
    entry: int


@dataclass
class DraftTreeOracle:
    """The draft tree of one request, `topk` lanes wide and `num_steps` draft steps deep.

    Attributes:
        entries: all candidates so far; the index is the entry id.
        lanes: per step, the entry ids of its lanes, best first.
        parent_lanes: per step, the previous step's lane that each lane grew from (0 at step 0: the root).
    """

    topk: int
    num_steps: int
    entries: list[Entry] = field(default_factory=list)
    lanes: list[list[int]] = field(default_factory=list)
    parent_lanes: list[list[int]] = field(default_factory=list)

    def grow(self, scores: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """One draft step: `scores[r][c]` and `tokens[r][c]` of child c of lane r; a single row at step 0."""
        parents = self.lanes[-1] if self.lanes else [-1]
        assert len(scores) == len(tokens) == len(parents)
        first = len(self.entries)
        for parent, row, row_tokens in zip(parents, scores, tokens, strict=True):
            for score, token in zip(row, row_tokens, strict=True):
                above = self.entries[parent].score if parent >= 0 else 0.0
                total = float32(above + (0.0 if score > 0.0 else float32(score)))
                self.entries.append(Entry(-math.inf if math.isnan(total) else total, token, parent))
        best = self.best_first(range(first, len(self.entries)))[: self.topk]
        self.lanes.append(best)
        self.parent_lanes.append([(entry - first) // self.topk for entry in best])

    def best_first(self, ids: Sequence[int]) -> list[int]:
        """Entry ids by score descending, ties to the lower id."""
        return sorted(ids, key=lambda i: (-self.entries[i].score, i))

    def ancestry(self, entry: int) -> list[int]:
        """`entry` and its ancestors up to, but without, the root."""
        path = []
        while entry >= 0:
            path.append(entry)
            entry = self.entries[entry].parent
        return path

    def lane_masks(self) -> list[int]:
        """Per lane of the last step, the draft slots it sees: bit `step * topk + lane` per ancestor lane.

        Slots beyond the window of `(num_steps - 1) * topk` have no bit. The integers are as wide as needed.
        """
        slot_of = {
            entry: step * self.topk + r
            for step, lanes in enumerate(self.lanes)
            for r, entry in enumerate(lanes)
        }
        window = (self.num_steps - 1) * self.topk
        masks = []
        for lane in self.lanes[-1]:
            slots = [slot_of[entry] for entry in self.ancestry(lane)]
            masks.append(sum(1 << slot for slot in slots if slot < window))
        return masks

    def select(self, num_nodes: int, root_token: int) -> list[Node]:
        """The root and the best `num_nodes - 1` entries, depth first, better siblings first.

        An entry whose parent is not kept, or does not rank before it, becomes a child of the root.
        """
        kept = self.best_first(range(len(self.entries)))[: num_nodes - 1]
        children: dict[int, list[int]] = {}
        for rank, entry in enumerate(kept):
            parent = self.entries[entry].parent
            children.setdefault(parent if parent in kept[:rank] else -1, []).append(entry)

        nodes = [Node(root_token, -1, 0.0, -1)]

        def number(entry: int, parent: int) -> None:
            nodes.append(Node(self.entries[entry].token, parent, self.entries[entry].score, entry))
            here = len(nodes) - 1
            for child in children.get(entry, []):
                number(child, here)

        for entry in children.get(-1, []):
            number(entry, 0)
        return nodes
