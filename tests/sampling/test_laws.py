"""Sampled backends have the target's law: what a request says, up to three tokens of it, over a vocabulary of eight.

The target is a table of logits by context. A round verifies a tree; where its path ends early, the next tokens are
drawn from the table. All texts of that length are counted against their exact probabilities. Samplers that are wrong
in a known way must fail the same count.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.oracles import trees
from tests.oracles.seeded_draw import law
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.kernels.rejection_tokens import reference as rejection_reference
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.sampling.gumbel import GumbelSampler, SlotDraws
from trtllm_tree.sampling.rejection import TreeRejectionSampler
from trtllm_tree.sampling.walk import WalkSampler
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

VOCAB, NUM_DRAWS, LIMIT = 8, 200_000, 1e-3
Setting = tuple[float, int, float, float]
Context = tuple[int, ...]
# (temperature, top_k, top_p, min_p)
HALF, ONE, HOT = (0.5, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.5, 0, 1.0, 0.0)
TOP_P, TOP_K = (1.5, 0, 0.8, 0.0), (1.0, 5, 1.0, 0.0)
ALL = (1.5, 6, 0.9, 0.05)
# Node tokens and parents. Children of a node are its draft's best, likely and unlikely ones for the target.
TREES: dict[str, tuple[list[int], list[int]]] = {
    "chain": ([0, 3, 0, 5], [-1, 0, 1, 2]),
    "depth 2": ([0, 3, 1, 6, 0, 5], [-1, 0, 1, 1, 0, 0]),
    "depth 3": ([0, 0, 2, 4, 5, 3, 1], [-1, 0, 1, 2, 2, 1, 0]),
}


def _table() -> dict[Context, list[float]]:
    generator = torch.Generator().manual_seed(11)
    contexts = [context for length in range(4) for context in product(range(VOCAB), repeat=length)]
    rows = torch.randn(len(contexts), VOCAB, generator=generator).mul(1.3).tolist()
    return dict(zip(contexts, rows, strict=True))


TABLE = _table()


def joint_law(setting: Setting, length: int) -> torch.Tensor:
    """Exact probabilities float64 [8] * length of a text's first tokens."""
    found = torch.zeros([VOCAB] * length, dtype=torch.float64)
    for text in product(range(VOCAB), repeat=length):
        found[text] = 1.0
        for i, token in enumerate(text):
            found[text] *= law(TABLE[text[:i]], *setting).get(token, 0.0)
    return found


def p_value(texts: torch.Tensor, want: torch.Tensor) -> float:
    """Of Pearson's chi-square test of `texts` [draws, length] against `want`; rare texts count as one."""
    cells = sum(texts[:, i].long() * VOCAB ** (texts.shape[1] - 1 - i) for i in range(texts.shape[1]))
    counts = torch.bincount(cells, minlength=want.numel()).double()
    expected = want.flatten() * len(texts)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    legal = expected > 0
    statistic = ((counts - expected)[legal].square() / expected[legal]).sum()
    freedom = torch.tensor((int(legal.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def node_rows(tokens: list[int], parents: list[int]) -> torch.Tensor:
    """The target's logits [N, 8] behind each node."""
    contexts = [tuple(tokens[node] for node in trees.path_to(parents, i)[1:]) for i in range(len(tokens))]
    return torch.tensor([TABLE[context] for context in contexts])


class Rig:
    """One sampler over requests that differ in their seeds only, as the engine would call it."""

    def __init__(
        self, kind: str, setting: Setting, num_nodes: int, *, tree: bool, batch: int = NUM_DRAWS
    ) -> None:
        temperature, top_k, top_p, min_p = setting
        self.batch, self.tree = batch, tree
        self.draws = SlotDraws(batch, batch * num_nodes, device="cpu")
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        self.draws.reset(0, params, 0)
        # As `reset` of every slot would, 200,000 times over.
        self.draws._options.copy_(self.draws._options[:, :1].expand(4, batch))
        self.draws._seeds.copy_(torch.arange(batch) * 7919 + 12345)
        made: Any = {"gumbel": GumbelSampler, "rejection": TreeRejectionSampler}[kind]
        self.sampler: WalkSampler = made(self.draws, batch, num_nodes, device="cpu", tree=tree)

    def texts(
        self, rows: torch.Tensor, tokens: torch.Tensor, parents: list[int], length: int
    ) -> torch.Tensor:
        """The first tokens [B, length] of every request, by target `rows` [N, 8] or [B, N, 8] and `tokens` [B, N]."""
        shape = torch.tensor([parents], dtype=torch.int32).expand(self.batch, -1).contiguous()
        depths, mask = tree_ancestors(shape)
        accepted = self.sampler.verify(
            rows.expand(self.batch, *rows.shape[-2:]).reshape(-1, VOCAB),
            tokens.int(),
            tree=TreeVerifyBatch(shape, depths, mask) if self.tree else None,
            slots=torch.arange(self.batch),
            positions=41 + depths.long(),
        )
        texts = torch.zeros(self.batch, length, dtype=torch.int64)
        kept = min(length, accepted.predict.shape[1])
        texts[:, :kept] = accepted.predict[:, :kept]
        return _continued(texts, accepted.accept_len, self.draws)


def _continued(texts: torch.Tensor, lengths: torch.Tensor, draws: SlotDraws) -> torch.Tensor:
    """Draw what a round left open from the target's conditional law, by noise of another kind."""
    temperature, top_p, min_p = draws._options[[0, 2, 3], 0].view(torch.float32).tolist()
    setting = (temperature, int(draws._options[1, 0]), top_p, min_p)
    generator = torch.Generator().manual_seed(5)
    for i in range(1, texts.shape[1]):
        weights = torch.zeros(VOCAB**i, VOCAB, dtype=torch.float64)
        for place, context in enumerate(product(range(VOCAB), repeat=i)):
            for token, weight in law(TABLE[context], *setting).items():
                weights[place, token] = weight
        place = sum(texts[:, j] * VOCAB ** (i - 1 - j) for j in range(i))
        drawn = weights[place].multinomial(1, generator=generator).squeeze(1)
        texts[:, i] = torch.where(lengths > i, texts[:, i], drawn)
    return texts


def texts_of(kind: str, setting: Setting, name: str, length: int) -> torch.Tensor:
    tokens, parents = TREES[name]
    rig = Rig(kind, setting, len(tokens), tree=name != "chain")
    candidates = torch.tensor(tokens).expand(NUM_DRAWS, -1)
    return rig.texts(node_rows(tokens, parents), candidates, parents, length)


@pytest.mark.parametrize("kind", ["gumbel", "rejection"])
@pytest.mark.parametrize(
    ("name", "setting", "length"),
    [
        ("chain", ONE, 3),
        ("chain", TOP_P, 3),
        ("depth 2", HALF, 3),
        ("depth 2", HOT, 2),
        ("depth 2", TOP_K, 3),
        ("depth 3", HALF, 2),
        ("depth 3", ONE, 3),
        ("depth 3", ALL, 3),
    ],
)
def test_what_is_said_has_the_targets_law(kind: str, name: str, setting: Setting, length: int) -> None:
    texts = texts_of(kind, setting, name, length)
    want = joint_law(setting, length)
    assert p_value(texts, want) > LIMIT
    # What the test can see: another temperature in the law of one token.
    warmer = (setting[0] * 1.03, *setting[1:])
    assert p_value(texts, joint_law(warmer, length)) < LIMIT


def test_a_seed_says_the_same_alone_and_in_a_batch() -> None:
    tokens, parents = TREES["depth 3"]
    rows, many = node_rows(tokens, parents), Rig("rejection", ALL, len(tokens), tree=True, batch=50)
    together = many.sampler.verify(**_call(many, rows, tokens, parents, torch.arange(50)))
    predict, lengths = together.predict.clone(), together.accept_len.clone()
    for slot in (0, 17, 49):
        alone = many.sampler.verify(**_call(many, rows, tokens, parents, torch.tensor([slot])))
        assert torch.equal(alone.predict[0], predict[slot]) and alone.accept_len[0] == lengths[slot]
    assert len({tuple(row) for row in predict.tolist()}) >= 8


def _call(
    rig: Rig, rows: torch.Tensor, tokens: list[int], parents: list[int], slots: torch.Tensor
) -> dict[str, Any]:
    shape = torch.tensor([parents] * len(slots), dtype=torch.int32)
    depths, mask = tree_ancestors(shape)
    return {
        "logits": rows.repeat(len(slots), 1),
        "tokens": torch.tensor([tokens] * len(slots), dtype=torch.int32),
        "tree": TreeVerifyBatch(shape, depths, mask),
        "slots": slots,
        "positions": 41 + depths.long(),
    }


DRAFT = torch.tensor([0.30, 0.05, 0.20, 0.15, 0.02, 0.08, 0.13, 0.07])


def _drawn_tree(counts: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Tokens [B, N] and draft probabilities [B, N, 8]: so many children of the root and of its first child, drawn."""
    generator = torch.Generator().manual_seed(3)
    parents = [-1, *[0] * counts[0], *[1] * counts[1]]
    probs = torch.zeros(NUM_DRAWS, len(parents), VOCAB)
    probs[:, 0], probs[:, 1] = DRAFT, DRAFT.flip(0)
    drawn = [
        probs[:, node].multinomial(count, replacement=False, generator=generator)
        for node, count in enumerate(counts)
        if count
    ]
    return torch.cat([torch.zeros(NUM_DRAWS, 1), *drawn], dim=1).long(), probs, parents


@pytest.mark.parametrize(("counts", "setting"), [((1, 1), HALF), ((1, 2), TOP_P), ((3, 0), HOT)])
def test_drawn_children_leave_the_targets_law(counts: tuple[int, int], setting: Setting) -> None:
    tokens, probs, parents = _drawn_tree(counts)
    rig = Rig("rejection", setting, len(parents), tree=True)
    table = torch.tensor([TABLE[()], *(TABLE[(token,)] for token in range(VOCAB))])
    # Behind the root; behind a child of it; behind a grandchild, which the first two tokens do not reach.
    rows = table[torch.cat([torch.zeros(NUM_DRAWS, 1).long(), 1 + tokens[:, 1:]], dim=1)]
    want = joint_law(setting, 2)
    as_chosen = rig.texts(rows, tokens, parents, 2)
    rig.sampler = TreeRejectionSampler(
        rig.draws, NUM_DRAWS, len(parents), device="cpu", tree=True, future_draft_probs=probs
    )
    assert p_value(rig.texts(rows, tokens, parents, 2), want) > LIMIT
    # Whatever drew them, the point-mass rule is as exact; another draft than the one that drew them is not.
    assert p_value(as_chosen, want) > LIMIT
    rig.sampler._future = probs.flip(2)  # type: ignore[attr-defined]
    assert p_value(rig.texts(rows, tokens, parents, 2), want) < LIMIT


@pytest.mark.parametrize("fault", ["no temperature in the ratio", "rejected children stay", "argmax"])
def test_a_wrong_sampler_does_not_have_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = HALF if fault == "no temperature in the ratio" else ONE
    want = joint_law(setting, 3)
    assert p_value(texts_of("rejection", setting, "depth 2", 3), want) > LIMIT
    real = rejection_reference._try_children

    def untempered(children: torch.Tensor, *keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seeds, positions, target, draft = keys
        return real(children, seeds, positions, (target.double() / 2**40).sqrt().mul(2**40).long(), draft)

    def forgiving(children: torch.Tensor, *keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, left = real(children, *keys)
        # No longer known as children: they may be drawn from what is left.
        children.fill_(-1)
        return accepted, left

    if fault == "no temperature in the ratio":
        monkeypatch.setattr(rejection_reference, "_try_children", untempered)
    elif fault == "rejected children stay":
        monkeypatch.setattr(rejection_reference, "_try_children", forgiving)
    else:
        monkeypatch.setattr(SlotDraws, "row_parameters", _greedy_parameters(SlotDraws.row_parameters))
    assert p_value(texts_of("rejection", setting, "depth 2", 3), want) < 1e-6


def _greedy_parameters(real: Any) -> Any:
    def parameters(*args: Any) -> dict[str, torch.Tensor]:
        found = real(*args)
        return found | {"temperatures": torch.zeros_like(found["temperatures"])}

    return parameters


def test_every_round_accepts_and_rejects_what_the_laws_are_about() -> None:
    for name, (tokens, parents) in TREES.items():
        rig = Rig("rejection", HOT, len(tokens), tree=True, batch=9000)
        call = _call(rig, node_rows(tokens, parents), tokens, parents, torch.arange(9000))
        accepted = rig.sampler.verify(**call)
        assert accepted.path is not None
        # Every node lies on some path, and paths of every length occur.
        assert set(range(len(tokens))) <= set(accepted.path.unique().tolist()), name
        assert set(accepted.accept_len.tolist()) == set(range(1, max(trees.depths(parents)) + 2)), name
        for path, length in zip(
            accepted.path[:200].tolist(), accepted.accept_len[:200].tolist(), strict=True
        ):
            assert all(parents[child] == parent for parent, child in pairwise(path[:length]))
