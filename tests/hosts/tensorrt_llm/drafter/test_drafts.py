"""What `TreeDrafter` drafts: the best path of the tree that a drafter without a cache would grow."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hosts.tensorrt_llm.drafter.flow import STEPS, Loop, Request, drafter_of, drafts_of, make_requests
from tests.oracles.draft_tree import DraftTreeOracle
from trtllm_tree.draft.eagle import Candidates


class SlowDrafter:
    """The best path of a tree whose every candidate is scored by a whole forward."""

    def __init__(self, model_dir: Path, topk: int, num_nodes: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.topk, self.num_nodes = topk, num_nodes

    def path(self, tokens: list[int]) -> list[int]:
        tree = DraftTreeOracle(self.topk, STEPS)
        for _ in range(STEPS):
            lanes = [
                [tree.entries[entry].token for entry in reversed(tree.ancestry(lane))]
                for lane in (tree.lanes[-1] if tree.lanes else [-1])
            ]
            rows = [self._children(tokens + lane) for lane in lanes]
            tree.grow([row[0] for row in rows], [row[1] for row in rows])
        nodes = tree.select(self.num_nodes, tokens[-1])
        worth = [0.0]
        for node in nodes[1:]:
            worth.append(worth[node.parent] + math.exp(node.score))
        number, path = max(range(len(nodes)), key=worth.__getitem__), []
        while number:
            path.append(nodes[number].token)
            number = nodes[number].parent
        return path[::-1]

    @torch.no_grad()
    def _children(self, tokens: list[int]) -> tuple[list[float], list[int]]:
        best = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(self.topk)
        return best.values.tolist(), best.indices.tolist()


@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_those_of_a_slow_drafter_without_a_cache(
    newest: Any, tiny_target: Path, other: Path, topk: int
) -> None:
    """Also after the sequence was cut: K/V of what is no longer there must not be seen."""
    drafter, requests = drafter_of(newest, other, topk), make_requests((5, 40), max_new=30)
    loop = Loop(tiny_target, drafter)
    loop.run(requests)
    slow = SlowDrafter(other, topk, 1 + STEPS if topk == 1 else 32)
    for cut in (0, 22, 9):
        sequences = [request.tokens[: len(request.tokens) - cut] for request in requests]
        # The second is then another sequence of the same length, but for its first tokens.
        sequences[1][20:25] = [9] * 5
        again = [
            Request(request.request_id, s, 0, 999) for request, s in zip(requests, sequences, strict=True)
        ]
        assert drafts_of(drafter, again) == [slow.path(tokens) for tokens in sequences]


def test_prompts_are_computed_once(
    newest: Any, tiny_target: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests((17, 66))
    loop = Loop(tiny_target, drafter_of(newest, other, 4))
    prefilled: list[int] = []
    draft_lm = sys.modules["trtllm_tree.hosts.tensorrt_llm.draft_lm"].DraftLM
    whole = draft_lm._prefill_rows

    def count(self: Any, segments: Any) -> None:
        prefilled.append(sum(segment.length for segment in segments))
        whole(self, segments)

    monkeypatch.setattr(draft_lm, "_prefill_rows", count)
    loop.run(requests)
    # A prompt and its first token, but for the S + 1 rows that every round computes.
    assert prefilled == [17 + 66 + 2 - 2 * (STEPS + 1)]


def test_prompts_longer_than_a_prefill_chunk_are_drafted_for(
    newest: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_tree.hosts.tensorrt_llm import draft_lm

    lengths = (50, 3, 33, 20)
    whole = drafts_of(drafter_of(newest, tiny_target, 4), make_requests(lengths))
    monkeypatch.setattr(draft_lm, "_PREFILL_ROWS", 16)
    assert drafts_of(drafter_of(newest, tiny_target, 4), make_requests(lengths)) == whole


@pytest.mark.parametrize("at", [1, 2])
def test_a_forward_that_fails_is_not_hidden_and_leaves_nothing_wrong(
    newest: Any, other: Path, at: int
) -> None:
    drafter, requests = drafter_of(newest, other, 3), make_requests((40,))
    drafts_of(drafter, requests)
    tokens = list(requests[0].tokens)
    requests[0].tokens[10:15] = [9] * 5
    runner, calls = drafter._model._runner, []
    whole = runner.forward

    def fail(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == at:
            raise RuntimeError("out of memory")
        return whole(*args)

    runner.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        drafts_of(drafter, requests)
    requests[0].tokens = tokens
    assert drafts_of(drafter, requests) == [SlowDrafter(other, 3, 32).path(requests[0].tokens)]


def test_the_best_path_has_the_largest_expected_acceptance_of_all(newest: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        nodes = int(torch.randint(2, 12, (), generator=generator))
        parents = [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes)]
        scores = [0.0] * nodes
        for node in range(1, nodes):
            scores[node] = scores[parents[node]] - 2 * float(torch.rand((), generator=generator))
        tokens = list(range(100, 100 + nodes))

        def path_to(node: int, parents: list[int] = parents) -> list[int]:
            return [] if node == 0 else [*path_to(parents[node]), node]

        worth = {node: sum(math.exp(scores[one]) for one in path_to(node)) for node in range(nodes)}
        drafted = Candidates(*(torch.tensor([row]) for row in (tokens, parents, scores)))
        (path,) = newest.best_paths(drafted)
        assert path == [tokens[node] for node in path_to(max(worth, key=worth.__getitem__))]


def test_scores_that_are_no_numbers_are_on_no_path(newest: Any) -> None:
    parents, nan, inf = [-1, 0, 1, 0], math.nan, math.inf
    for scores, expected in (
        ([0.0, -1.0, nan, nan], [11]),
        ([0.0, nan, -1.0, -3.0], [13]),
        ([0.0, -inf, -inf, -inf], []),
    ):
        drafted = Candidates(*(torch.tensor([row]) for row in ([10, 11, 12, 13], parents, scores)))
        assert newest.best_paths(drafted) == [expected]
