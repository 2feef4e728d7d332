"""rejection_tokens: plain Python, the torch reference and the Triton kernel agree, on trees of every shape.

That the tokens have the target's law is shown for whole paths in tests/sampling/test_laws.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels.test_sampled_tokens import (
    SETTINGS,
    hostile_logits,
    parameters,
    rows_at_the_edge_of_gathering,
)
from tests.oracles import trees
from tests.oracles.rejection import rejection_token
from trtllm_tree.kernels.rejection_tokens import gathered_shape, rejection_tokens, workspace_shape
from trtllm_tree.kernels.rejection_tokens import triton as kernel
from trtllm_tree.kernels.rejection_tokens.reference import reference
from trtllm_tree.kernels.sampled_tokens import sampled_tokens

Parameters = dict[str, torch.Tensor]
PLAIN = (1.0, 0, 1.0, 0.0)


def oracle(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    given: Parameters,
    draft_probs: torch.Tensor | None = None,
) -> list[int]:
    num_nodes = candidates.shape[1]
    found = []
    for row, arguments in enumerate(zip(*(given[name].tolist() for name in given), strict=True)):
        request, node = divmod(row, num_nodes)
        shape, tokens = parents[request].tolist(), candidates[request].tolist()
        children = [tokens[j] for j in range(node + 1, num_nodes) if shape[j] == node]
        draft = None if draft_probs is None else draft_probs[request, node].tolist()
        found.append(rejection_token(logits[row].float().tolist(), children, draft, *arguments))
    return found


def by_reference(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    given: Parameters,
    draft_probs: torch.Tensor | None = None,
) -> list[int]:
    tokens = torch.full((len(logits),), 12345, dtype=torch.int32, device=logits.device)
    reference(logits, candidates, parents, *given.values(), draft_probs, tokens)
    return tokens.tolist()


def by_kernel(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    given: Parameters,
    draft_probs: torch.Tensor | None = None,
) -> list[int]:
    tokens = torch.full((len(logits),), 12345, dtype=torch.int32, device=logits.device)
    workspace = torch.zeros(workspace_shape(len(logits)), dtype=torch.int64, device=logits.device)
    gathered = torch.full(gathered_shape(len(logits)), -1, dtype=torch.int64, device=logits.device)
    # The last row has no room to gather in.
    room = gathered[: max(1, len(logits) - 1)]
    kernel.launch(logits, candidates, parents, *given.values(), draft_probs, tokens, workspace, room)
    assert not workspace.any()
    return tokens.tolist()


def settings_of(rows: int) -> list[tuple[float, int, float, float]]:
    return [SETTINGS[row % len(SETTINGS)] for row in range(rows)]


def strided(rows: list[list[int]], device: str) -> torch.Tensor:
    """int32 [B, N] whose rows are further apart than they are long, with garbage between them."""
    wide = torch.full((len(rows), len(rows[0]) + 3), 777, dtype=torch.int32, device=device)
    wide[:, : len(rows[0])] = torch.tensor(rows, dtype=torch.int32)
    return wide[:, : len(rows[0])]


def likely_candidates(rng: random.Random, logits: torch.Tensor, parents: list[list[int]]) -> list[list[int]]:
    """Mostly tokens that the parent's row likes, so that many are accepted; some twice, some outside the vocabulary."""
    num_nodes, vocab = len(parents[0]), logits.shape[1]
    best = logits.float().topk(min(4, vocab), dim=1).indices.view(len(parents), num_nodes, -1).tolist()
    tokens = []
    for request, shape in enumerate(parents):
        found = [rng.choice(best[request][max(parent, 0)]) for parent in shape]
        tokens.append(
            [t if rng.random() < 0.8 else rng.choice([rng.randrange(vocab), -1, vocab]) for t in found]
        )
    return tokens


def some_parents(rng: random.Random, batch: int, num_nodes: int) -> list[list[int]]:
    shapes = [trees.chain(num_nodes), trees.star(num_nodes)] if batch > 2 else []
    return [shapes.pop() if shapes else trees.random_tree(rng, num_nodes) for _ in range(batch)]


def some_draft_probs(
    rng: random.Random, candidates: list[list[int]], parents: list[list[int]], size: int, device: str
) -> torch.Tensor:
    """Rows that drew, rows that did not, and rows that give nothing to most ids, the children's among them or not."""
    probs = torch.rand(len(parents), len(parents[0]), size).square()
    probs[torch.rand(probs.shape) < 0.3] = 0.0
    for request, shape in enumerate(parents):
        for node, parent in enumerate(shape):
            if parent >= 0 and 0 <= candidates[request][node] < size and rng.random() < 0.9:
                probs[request, parent, candidates[request][node]] += 0.3
    probs[torch.rand(probs.shape[:2]) < 0.25] = 0.0
    return (probs / probs.sum(dim=2, keepdim=True).clamp(min=1e-9)).to(device)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize(
    ("vocab", "num_nodes", "batch", "dtype"),
    [
        (7, 1, 3, torch.float32),
        (8, 6, 5, torch.float32),
        (1000, 7, 3, torch.bfloat16),
        (50, 64, 1, torch.float16),
        (30, 65, 1, torch.bfloat16),
        (9, 128, 1, torch.bfloat16),
        (4099, 6, 3, torch.float32),
    ],
)
def test_three_derivations_agree_in_one_batch_of_everything(
    vocab: int, num_nodes: int, batch: int, dtype: torch.dtype, is_drawn: bool, device: str
) -> None:
    torch.manual_seed(vocab + num_nodes)
    rng = random.Random(vocab + num_nodes)
    logits = hostile_logits(vocab, batch * num_nodes, dtype, device)
    logits[:: 3 * num_nodes + 1, vocab // 2] = torch.nan
    shapes = some_parents(rng, batch, num_nodes)
    tokens = likely_candidates(rng, logits.nan_to_num(), shapes)
    drawn = some_draft_probs(rng, tokens, shapes, max(1, vocab - 2), device) if is_drawn else None
    case = (logits, strided(tokens, device), strided(shapes, device))
    # The interpreter is slow at searches, so a tree with many nodes has them at few.
    settings = [
        PLAIN if num_nodes > 20 and row % 8 else each for row, each in enumerate(settings_of(len(logits)))
    ]
    given = parameters(settings, device, seed=vocab)
    want = oracle(*case, given, drawn)
    assert by_reference(*case, given, drawn) == want
    assert by_kernel(*case, given, drawn) == want
    # Children were accepted, and rejected.
    parent_tokens = [
        (want[request * num_nodes + parent], tokens[request][node])
        for request, shape in enumerate(shapes)
        for node, parent in enumerate(shape)
        if parent >= 0
    ]
    if len(parent_tokens) > 12:
        assert 0 < sum(token == child for token, child in parent_tokens) < len(parent_tokens)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["chosen", "drawn"])
def test_many_siblings_are_rejected_one_after_the_other(is_drawn: bool, device: str) -> None:
    """Five siblings over eight ids, some twice: nearly every row rejects several before it accepts or draws."""
    torch.manual_seed(9)
    rng = random.Random(9)
    batch, num_nodes = 24, 6
    logits = torch.randn(batch * num_nodes, 8, device=device)
    shapes = [trees.star(num_nodes) for _ in range(batch)]
    tokens = [[rng.randrange(8) for _ in range(num_nodes)] for _ in range(batch)]
    drawn = some_draft_probs(rng, tokens, shapes, 8, device) if is_drawn else None
    case = (logits, strided(tokens, device), strided(shapes, device))
    given = parameters([(1.5, 0, 1.0, 0.0)] * len(logits), device, seed=2)
    want = oracle(*case, given, drawn)
    places = [
        next((i for i, token in enumerate(row[1:]) if token == said), -1)
        for row, said in zip(tokens, want[::num_nodes], strict=True)
    ]
    assert -1 in places and len(set(places)) >= 4
    assert by_reference(*case, given, drawn) == want
    assert by_kernel(*case, given, drawn) == want


@pytest.mark.parametrize("is_drawn", [False, True], ids=["chosen", "drawn"])
def test_too_few_too_many_or_just_enough_ids_to_gather_make_no_difference(
    is_drawn: bool, device: str
) -> None:
    torch.manual_seed(6)
    rng = random.Random(6)
    rows, settings = (x[:14] for x in rows_at_the_edge_of_gathering(6001))
    # Each is a root's row, behind which three likely children are tried.
    logits = rows.repeat_interleave(4, dim=0).to(torch.bfloat16).to(device)
    shapes = [trees.star(4) for _ in settings]
    tokens = likely_candidates(rng, logits.nan_to_num(), shapes)
    drawn = some_draft_probs(rng, tokens, shapes, 6000, device) if is_drawn else None
    case = (logits, strided(tokens, device), strided(shapes, device))
    # The other rows are leaves of no interest.
    given = parameters([each for s in settings for each in (s, *[(0.0, 0, 1.0, 0.0)] * 3)], device)
    want = oracle(*case, given, drawn)
    assert by_reference(*case, given, drawn) == want
    assert by_kernel(*case, given, drawn) == want


@pytest.mark.parametrize("draw", [by_reference, by_kernel])
def test_without_children_or_temperature_it_is_the_seeded_draw(draw, device: str) -> None:
    torch.manual_seed(0)
    logits = hostile_logits(300, 4 * len(SETTINGS), torch.float32, device)
    given = parameters(settings_of(len(logits)), device)
    alone = torch.full((len(logits), 1), -1, dtype=torch.int32, device=device)
    assert draw(logits, alone, alone, given) == sampled_tokens(logits, **given).tolist()
    greedy = dict(given, temperatures=torch.zeros_like(given["temperatures"]))
    chain = torch.arange(-1, len(logits) - 1, dtype=torch.int32, device=device).unsqueeze(0)
    candidates = torch.randint(300, (1, len(logits)), dtype=torch.int32).to(device)
    assert draw(logits, candidates, chain, greedy) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("draw", [by_reference, by_kernel])
def test_a_row_depends_on_nothing_but_its_own_arguments_and_children(draw, device: str) -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    logits = hostile_logits(100, 4 * 6, torch.bfloat16, device)
    shapes = some_parents(rng, 4, 6)
    candidates, parents = (
        strided(likely_candidates(rng, logits, shapes), device),
        strided(shapes, device),
    )
    given = parameters(settings_of(len(logits)), device)
    tokens = draw(logits, candidates, parents, given)
    for request in range(0, 4, 3):
        rows = slice(6 * request, 6 * request + 6)
        some = {name: value[rows].contiguous() for name, value in given.items()}
        alone = (logits[rows], candidates[request : request + 1], parents[request : request + 1])
        assert draw(*alone, some) == tokens[rows]
    others = logits.clone()
    others.view(4, 6, -1)[::2] = torch.nan
    for request, found in enumerate(
        torch.tensor(draw(others, candidates, parents, given)).view(4, 6).tolist()
    ):
        assert found == ([-1] * 6 if request % 2 == 0 else tokens[6 * request : 6 * request + 6])


def test_every_half_of_seed_and_position_and_the_siblings_place_decide(device: str) -> None:
    # A child that its target likes half of the time, behind each of 40 roots.
    logits = torch.zeros(80, 2, device=device)
    shapes = torch.tensor([[-1, 0]] * 40, dtype=torch.int32, device=device)
    candidates = torch.tensor([[0, 1]] * 40, dtype=torch.int32, device=device)
    found = []
    for seed, position in ((1, 9), (2, 9), (1 + 2**32, 9), (1, 10), (1, 9 + 2**32)):
        given = parameters([PLAIN] * 80, device)
        given["seeds"] = torch.full_like(given["seeds"], seed) + 1000 * torch.arange(80, device=device)
        given["positions"] = torch.full_like(given["positions"], position)
        found.append(tuple(by_reference(logits, candidates, shapes, given)[::2]))
        few = {name: value[:8].contiguous() for name, value in given.items()}
        assert tuple(by_kernel(logits[:8], candidates[:4], shapes[:4], few)[::2]) == found[-1][:4]
    assert len(set(found)) == 5
    # Three siblings of a third each: the number of one must not be another's.
    logits = torch.zeros(4 * 300, 3, device=device)
    shapes = torch.tensor([[-1, 0, 0, 0]] * 300, dtype=torch.int32, device=device)
    candidates = torch.tensor([[0, 0, 1, 2]] * 300, dtype=torch.int32, device=device)
    given = parameters([PLAIN] * 1200, device)
    counts = torch.tensor(by_reference(logits, candidates, shapes, given)[::4]).bincount(minlength=3)
    assert ((counts - 100).abs() < 40).all()


@pytest.mark.parametrize("draw", [by_reference, by_kernel])
def test_infinities_and_the_only_kept_id(draw, device: str) -> None:
    logits = torch.full((5, 300), -torch.inf, device=device)
    logits[1, [17, 290]] = torch.inf
    logits[2, 4] = 0.0
    logits[3] = torch.arange(300.0, device=device)
    candidates = torch.tensor(
        [[9, 3], [9, 290], [9, 4], [9, 299], [9, 250]], dtype=torch.int32, device=device
    )
    rows = logits.repeat_interleave(2, dim=0)
    parents = torch.tensor([[-1, 0]] * 5, dtype=torch.int32, device=device)
    for setting in (PLAIN, (1.0, 1, 1.0, 0.0), (2.0, 0, 1e-9, 0.0)):
        given = parameters([setting] * 10, device)
        found = draw(rows, candidates, parents, given)[::2]
        assert found[2] == 4
        assert found[1] in ((17, 290) if setting == PLAIN else (17,))
        if setting != PLAIN:
            # The child is no kept id.
            assert found[3:] == [299, 0] and found[0] == 0


def test_the_buffers_are_the_callers_and_serve_call_after_call(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    workspace = torch.zeros(workspace_shape(8), dtype=torch.int64, device=device)
    gathered = torch.empty(gathered_shape(8), dtype=torch.int64, device=device)
    # Each call's logits are lower than those before it: a maximum left behind would win.
    for rows, vocab, peak in ((8, 5000, 50.0), (4, 2500, -1.0), (8, 100, -70.0)):
        logits = torch.full((rows, vocab), -900.0, device=device)
        places = [(7 * row + vocab // 2) % vocab for row in range(rows)]
        logits[range(rows), places] = peak
        nodes = torch.full((rows // 2, 2), -1, dtype=torch.int32, device=device)
        given = parameters(list(SETTINGS[1 : 1 + rows]), device)
        found = rejection_tokens(logits, nodes, nodes, **given, workspace=workspace, gathered=gathered)
        assert found.tolist() == places
        assert not workspace.any()


@pytest.mark.parametrize(
    "name", ["candidates", "parents", "seeds", "positions", "temperatures", "top_ks", "top_ps", "min_ps"]
)
def test_arguments_of_another_type_or_size_are_refused_by_name(name: str, device: str) -> None:
    logits = torch.zeros(4, 10, device=device)
    nodes = torch.zeros(2, 2, dtype=torch.int32, device=device)
    given = {"candidates": nodes, "parents": nodes, **parameters([PLAIN] * 4, device)}
    for wrong in (given[name][:1], given[name].half()):
        with pytest.raises(AssertionError, match="candidates|parents" if name == "candidates" else name):
            rejection_tokens(logits, **{**given, name: wrong})


def test_draft_probabilities_of_another_shape_are_refused(device: str) -> None:
    logits = torch.zeros(4, 10, device=device)
    nodes = torch.zeros(2, 2, dtype=torch.int32, device=device)
    given = parameters([PLAIN] * 4, device)
    for wrong in (torch.ones(2, 2, 11), torch.ones(4, 10), torch.ones(2, 2, 10).double()):
        with pytest.raises(AssertionError, match="draft_probs"):
            rejection_tokens(logits, nodes, nodes, **given, draft_probs=wrong.to(device))
