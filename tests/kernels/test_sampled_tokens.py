"""sampled_tokens: plain Python, the torch reference and the Triton kernel agree, and what they draw has the law."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles.seeded_draw import gumbel as exact_gumbel
from tests.oracles.seeded_draw import law, philox, seeded_draw
from trtllm_tree.kernels._few import launch_likely_ranks
from trtllm_tree.kernels._row_law import gumbel as kernel_gumbel
from trtllm_tree.kernels._row_law_torch import gumbel
from trtllm_tree.kernels._row_law_torch import philox as torch_philox
from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.sampled_tokens import gathered_shape, sampled_tokens, workspace_shape
from trtllm_tree.kernels.sampled_tokens import triton as kernel
from trtllm_tree.kernels.sampled_tokens.reference import reference

# Counter, key and words of kat_vectors, the file that comes with the Random123 library.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
# (temperature, top_k, top_p, min_p): greedy, plain, each filter alone, all together, and filters that keep one or all.
SETTINGS = (
    (0.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.1),
    (0.3, 0, 1.0, 0.0),
    (1.0, -1, 1.5, -1.0),
    (1.5, 0, 1.0, 0.0),
    (0.8, 5, 1.0, 0.0),
    (1.2, 0, 0.83, 0.0),
    (1.0, 0, 1.0, 0.07),
    (1.4, 40, 0.91, 0.013),
    (1.1, 3, 0.6, 0.0),
    (2.0, 1, 1.0, 0.0),
    (2.0, 0, 0.0, 0.0),
    (2.0, 0, 1.0, 1.0),
    (0.7, 10**9, 0.97, 0.0),
)
Parameters = dict[str, torch.Tensor]


def parameters(settings: list[tuple[float, int, float, float]], device: str, *, seed: int = 0) -> Parameters:
    """A row each, with seeds and positions of every sign and size."""
    temperatures, top_ks, top_ps, min_ps = zip(*settings, strict=True)
    generator = torch.Generator().manual_seed(seed)
    wide = {"low": -(2**63), "high": 2**63 - 1, "size": (2, len(settings)), "generator": generator}
    seeds, positions = torch.randint(**wide)
    seeds[::3] %= 100
    positions[::2] %= 5000
    values: Parameters = {
        "seeds": seeds,
        "positions": positions & (2**62 - 1),
        "temperatures": torch.tensor(temperatures),
        "top_ks": torch.tensor(top_ks, dtype=torch.int32),
        "top_ps": torch.tensor(top_ps),
        "min_ps": torch.tensor(min_ps),
    }
    return {name: value.to(device) for name, value in values.items()}


def oracle(logits: torch.Tensor, given: Parameters) -> list[int]:
    rows = logits.float().tolist()
    columns = [given[name].tolist() for name in given]
    return [seeded_draw(row, *arguments) for row, *arguments in zip(rows, *columns, strict=True)]


def by_reference(logits: torch.Tensor, given: Parameters) -> torch.Tensor:
    tokens = torch.full((len(logits),), 12345, dtype=torch.int32, device=logits.device)
    reference(logits, *given.values(), tokens)
    return tokens


def by_kernel(logits: torch.Tensor, given: Parameters) -> torch.Tensor:
    tokens = torch.full((len(logits),), 12345, dtype=torch.int32, device=logits.device)
    workspace = torch.zeros(workspace_shape(len(logits)), dtype=torch.int64, device=logits.device)
    gathered = torch.full(gathered_shape(len(logits)), -1, dtype=torch.int64, device=logits.device)
    # The last row has no room to gather in.
    kernel.launch(logits, *given.values(), tokens, workspace, gathered[: max(1, len(logits) - 1)])
    assert not workspace.any()
    return tokens


def by_plain_kernel(logits: torch.Tensor, given: Parameters) -> torch.Tensor:
    """Of rows that keep all ids, whatever their parameters say: NaN would show that one was looked at."""
    tokens = torch.full((len(logits),), 12345, dtype=torch.int32, device=logits.device)
    workspace = torch.zeros(workspace_shape(len(logits)), dtype=torch.int64, device=logits.device)
    unused = {name: torch.full_like(given[name], torch.nan) for name in ("top_ps", "min_ps")}
    unused["top_ks"] = torch.full_like(given["top_ks"], 3)
    gathered = torch.empty(0, gathered_shape(1)[1], dtype=torch.int64, device=logits.device)
    kernel.launch(logits, *(given | unused).values(), tokens, workspace, gathered, filters=False)
    assert not workspace.any()
    return tokens


def hostile_logits(vocab: int, rows: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows strided so that most of them are not aligned; many logits are -inf, and bf16 makes many of them equal."""
    logits = torch.randn(rows, vocab + 3).mul(3)
    logits[:, vocab // 2 : vocab // 2 + vocab // 5] = -torch.inf
    return logits.to(dtype)[:, :vocab].to(device)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_noise_comes_from_the_published_generator(counter, key, words, device: str) -> None:
    assert philox(counter, key) == words
    seed = torch.tensor([key[0] + key[1] * 2**32 - (2**64 if key[1] >= 2**31 else 0)])
    assert torch.cat(torch_philox(*torch.tensor(counter).unsqueeze(1), seed)).tolist() == list(words)
    signed = [word - 2**32 if word >= 2**31 else word for word in counter]
    out = torch.zeros(4, dtype=torch.int64, device=device)
    counter_on = torch.tensor(signed, dtype=torch.int32, device=device)
    philox_kernel[(1,)](seed.to(device), counter_on, out)
    assert out.tolist() == list(words)


@triton.jit
def philox_kernel(seed_ptr, counter_ptr, out_ptr):
    c0, c1 = tl.load(counter_ptr), tl.load(counter_ptr + 1)
    c2, c3 = tl.load(counter_ptr + 2), tl.load(counter_ptr + 3)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr, w0.to(tl.int64))
    tl.store(out_ptr + 1, w1.to(tl.int64))
    tl.store(out_ptr + 2, w2.to(tl.int64))
    tl.store(out_ptr + 3, w3.to(tl.int64))


@triton.jit
def gumbel_kernel(word_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, kernel_gumbel(tl.load(word_ptr + index)))


def test_noise_is_finite_and_exact_where_draws_are_decided(device: str) -> None:
    edges = [
        0,
        1,
        2,
        2**31 - 1,
        2**31,
        2**31 + 1,
        2**32 - 1,
        2**32 - 2,
        2**32 - 3,
        2**32 - 2**8,
        2**32 - 2**20,
    ]
    words = torch.cat(
        [torch.tensor(edges), torch.randint(2**32, (256 - len(edges),), generator=torch.Generator())]
    )
    want = torch.tensor([exact_gumbel(word) for word in words.tolist()], dtype=torch.float64)
    out = torch.zeros(256, device=device)
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    gumbel_kernel[(1,)](signed.to(device), out, SIZE=256)
    for got in (gumbel(words), out.cpu()):
        # An error of the noise is an error of the logarithm of a probability; -1/2 + 1/2 is nowhere near here.
        assert (got.double() - want).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *((vocab, dtype) for vocab in (1, 7, 1000) for dtype in (torch.float32, torch.bfloat16)),
        (1000, torch.float16),
        (4099, torch.float32),
        (4099, torch.bfloat16),
    ],
)
def test_three_derivations_agree_in_one_batch_of_everything(
    vocab: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab)
    logits = hostile_logits(vocab, len(SETTINGS), dtype, device)
    given = parameters(list(SETTINGS), device, seed=vocab)
    want = oracle(logits, given)
    assert by_reference(logits, given).tolist() == want
    assert by_kernel(logits, given).tolist() == want


def test_a_large_vocabulary_agrees_as_well(device: str) -> None:
    torch.manual_seed(5)
    logits = hostile_logits(50257, 3, torch.float32, device)
    given = parameters([(1.0, 0, 1.0, 0.0), (0.9, 50, 0.95, 0.0), (1.3, 0, 0.9, 0.0)], device)
    want = oracle(logits, given)
    assert by_reference(logits, given).tolist() == want
    assert by_kernel(logits, given).tolist() == want


def test_rows_take_every_way_to_their_token(device: str) -> None:
    torch.manual_seed(8)
    settings = [
        # Too many ids for the workspace, the last one gathered or not; so many ties that they overflow it.
        (1.0, 2500, 1.0, 0.0),
        (0.9, 2500, 0.9, 0.001),
        (1.0, 4, 0.6, 0.0),
        # Gathered, and cut by mass and by the peak; the best score of all is then hardly ever kept.
        (3.0, 40, 0.7, 0.0),
        (3.0, 40, 1.0, 0.5),
        (3.0, 0, 0.01, 0.0),
        (3.0, 0, 0.3, 0.6),
        (5.0, 0, 1.0, 0.9),
    ]
    logits = torch.randn(len(settings), 6000, device=device)
    logits[2] = 1.0
    for seed in range(3):
        given = parameters(settings, device, seed=seed)
        assert by_kernel(logits, given).tolist() == oracle(logits, given)


FEW = gathered_shape(1)[1]


def gathered_counts(logits: torch.Tensor, given: Parameters, num_gathering: int = 99) -> list[int]:
    """How many ids of each row reach its likely rank."""
    ranks = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    room = torch.empty(num_gathering, FEW, dtype=torch.int64, device=logits.device)
    launch_likely_ranks(logits, given["temperatures"], given["top_ks"], ranks, room)
    bits = logits.float().masked_fill(logits == 0, 0.0).view(torch.int32)
    return ((bits ^ (bits >> 31 & 0x7FFFFFFF)) >= ranks.unsqueeze(1)).sum(dim=1).tolist()


def rows_at_the_edge_of_gathering(vocab: int) -> tuple[torch.Tensor, list[tuple[float, int, float, float]]]:
    """Rows of which just enough, too few, just not too many and too many ids reach the likely logit."""
    generator = torch.Generator().manual_seed(vocab)
    settings = [
        (2.0, 40, 0.9, 0.0),
        (50.0, 20, 1.0, 0.0),
        (2.0, 1, 0.5, 0.0),
        (2.0, 30, 0.8, 0.0),
        (1.5, 50, 1.0, 0.0),
        (1.5, 1, 1.0, 0.0),
        (1.5, 50, 1.0, 0.0),
        (1.5, 20, 0.9, 0.0),
        (1.5, 20, 0.9, 0.0),
        (1.5, 0, 1.0, 0.0),
        (1.5, 7, 1.0, 0.0),
        # Each of twenty ids is drawn as often, so that some draw is the one that was not gathered.
        *[(50.0, 20, 1.0, 0.0)] * 20,
    ]
    logits = torch.full((len(settings), vocab), -50.0)
    # The likely logit is read off these ids.
    seen = torch.arange(FEW) * vocab // FEW
    unseen = torch.ones(vocab, dtype=torch.bool).index_fill(0, seen, False).nonzero().squeeze(1)
    # Exactly top_k of two values, one less, and many more.
    logits[0, seen[5:35]], logits[0, unseen[:10]] = 5.0, 6.0
    logits[1, seen[5:23]], logits[1, unseen[:1]] = 5.0, 6.0
    logits[2, torch.cat([seen[:150], unseen[:150]])] = 5 + torch.rand(300, generator=generator)
    # Nine are above the rest, and the last kept ones are ties, most of which are left out.
    logits[3] = 0.0
    logits[3, seen[100:1000]] = 1.0
    logits[3, unseen[:9]] = 2.0
    # As many as there is room for, and one more.
    for row, count in ((4, FEW), (5, FEW + 1)):
        logits[row, torch.cat([seen[-1000:], unseen[1000 - count :]])] = 1.0
    logits[5, vocab - 1] = 2.0
    logits[6] = 1.0
    logits[7] = -torch.inf
    logits[8] = torch.randn(vocab, generator=generator)
    logits[8, unseen[3]] = torch.nan
    logits[9:11] = torch.randn(2, vocab, generator=generator)
    logits[11:] = logits[1]
    return logits, settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_too_few_too_many_or_just_enough_ids_to_gather_make_no_difference(dtype, device: str) -> None:
    logits, settings = rows_at_the_edge_of_gathering(6001)
    logits = logits.to(dtype).to(device)
    counts = gathered_counts(logits, parameters(settings, device))
    assert (counts[0], counts[1], counts[3], counts[4], counts[5]) == (40, 19, 909, FEW, FEW + 1)
    assert counts[6:8] == [6001, 6001] and counts[9] == 0
    for seed in range(2):
        given = parameters(settings, device, seed=seed)
        want = oracle(logits, given)
        assert by_reference(logits, given).tolist() == want
        assert by_kernel(logits, given).tolist() == want


@pytest.mark.parametrize("vocab", [FEW - 1, FEW, FEW + 1])
def test_a_vocabulary_of_about_as_many_ids_as_are_gathered(vocab: int, device: str) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab).mul(2).to(device)
    settings = [
        (1.5, k, p, 0.0) for k, p in ((50, 0.9), (1, 1.0), (vocab - 1, 1.0), (vocab, 0.9), (600, 0.99))
    ]
    given = parameters([*settings, (1.5, 50, 0.9, 0.0)], device)
    assert by_kernel(logits, given).tolist() == oracle(logits, given)


def test_a_row_gathers_what_a_small_top_k_needs_or_nothing(device: str) -> None:
    torch.manual_seed(4)
    settings = [(1.0, 50, 1.0, 0.0), (0.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 9000, 1.0, 0.0)]
    given = parameters([*settings, (1.0, 50, 1.0, 0.0)], device)
    counts = gathered_counts(torch.randn(5, 20000, device=device), given, num_gathering=4)
    assert 50 <= counts[0] <= 400
    assert counts[1:] == [0] * 4


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (1.3, 20, 0.9, 0.001), (0.0, 0, 1.0, 0.0)])
def test_infinities_and_nan(setting, device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 5000)
    logits[0, 4999] = torch.nan
    logits[1, 0], logits[1, 4990] = -torch.nan, torch.inf
    logits[2] = -torch.inf
    logits[3, [4097, 4998]] = torch.inf
    logits[4] = -torch.inf
    logits[4, 4500] = -3e38
    logits[5] = torch.nan
    logits[6, 17] = 3e38
    given = parameters([setting] * 7, device)
    for draw in (by_reference, by_kernel):
        # Of equally infinite logits the noise tells none apart: the lower id.
        assert draw(logits.to(device), given).tolist() == [-1, -1, 0, 4097, 4500, -1, 17]


def test_ties_at_a_boundary_go_to_the_lower_ids(device: str) -> None:
    # Whatever is drawn from equal logits: ids 0 to 2 by count, 0 to 3 by half of the mass of 8.
    for setting, kept in (((1.0, 3, 1.0, 0.0), 3), ((1.0, 0, 0.5, 0.0), 4), ((1.0, 6, 0.5, 0.0), 3)):
        for value, dtype in ((0.0, torch.float32), (-5.0, torch.bfloat16)):
            logits = torch.full((60, 8), value, dtype=dtype, device=device)
            given = parameters([setting] * 60, device)
            tokens = by_reference(logits, given).tolist()
            assert set(tokens) == set(range(kept))
            assert by_kernel(logits[:6], {name: x[:6] for name, x in given.items()}).tolist() == tokens[:6]
    # Ties behind larger logits, over several blocks: 2 above, then 3 of the equal ones.
    logits = torch.zeros(24, 5000, dtype=torch.bfloat16)
    logits[:, [4000, 4400]] = 1.0
    logits[:, [1, 4999]] = -1.0
    given = parameters([(3.0, 5, 1.0, 0.0)] * 24, device)
    tokens = by_reference(logits.to(device), given).tolist()
    assert set(tokens) == {0, 2, 3, 4000, 4400}
    assert by_kernel(logits.to(device), given).tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_boundary_among_neighbouring_floats_is_found(dtype: torch.dtype, device: str) -> None:
    # Eight neighbours of 1 in bf16, three ids each: a boundary inside and at the end of every group of ties.
    row = (1 + torch.arange(24).remainder(8) / 128).to(dtype)
    many = parameters([(1.0, 0, 1.0, 0.0)] * 2000, device)
    plain = by_reference(row.expand(2000, 24).to(device), many).tolist()
    order = sorted(range(24), key=lambda i: (-row[i].item(), i))
    # Draws that without the filter fall on the last kept id, and on the first one left out.
    cases = [(k, plain.index(order[place])) for k in range(1, 24) for place in (k - 1, k)]
    given = {name: value[[case for _, case in cases]] for name, value in many.items()}
    given["top_ks"] = torch.tensor([k for k, _ in cases], dtype=torch.int32, device=device)
    logits = row.expand(len(cases), 24).contiguous().to(device)
    want = oracle(logits, given)
    assert want[::2] == order[:23]
    assert by_reference(logits, given).tolist() == want
    assert by_kernel(logits, given).tolist() == want


def test_minus_zero_ties_with_zero(device: str) -> None:
    logits = torch.zeros(16, 8)
    logits[:, :4] = -0.0
    given = parameters([(1.0, 3, 1.0, 0.0)] * 16, device)
    for draw in (by_reference, by_kernel):
        assert set(draw(logits.to(device), given).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.5, 0.75, 0.875])
def test_where_rounding_decides_top_p_is_off_by_one_token_at_most(top_p: float, device: str) -> None:
    probabilities = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32])
    logits = probabilities.log().expand(24, 6).contiguous().to(device)
    exact = round(-math.log2(1 - top_p))
    given = parameters([(1.0, 0, top_p, 0.0)] * 24, device)
    for draw in (by_reference, by_kernel):
        drawn = set(draw(logits, given).tolist())
        assert set(range(exact)) <= drawn <= set(range(exact + 1))


def test_a_row_depends_on_nothing_but_its_own_arguments(device: str) -> None:
    torch.manual_seed(2)
    logits = hostile_logits(4500, len(SETTINGS), torch.float32, device)
    given = parameters(list(SETTINGS), device)
    tokens = by_kernel(logits, given)
    order = torch.randperm(len(SETTINGS))[:9].to(device)
    some = {name: value[order] for name, value in given.items()}
    assert torch.equal(by_kernel(logits[order].contiguous(), some), tokens[order])
    # Other rows turn to NaN, and the reference, whose work depends on who else draws, is as independent.
    others = logits.clone()
    others[::2] = torch.nan
    for draw in (by_kernel, by_reference):
        assert torch.equal(draw(others, given)[1::2], tokens[1::2])
    assert torch.equal(by_reference(logits[order], some), tokens[order])


def test_every_half_of_seed_and_position_changes_the_draw(device: str) -> None:
    logits = torch.zeros(5, 1000, device=device)
    given = parameters([(1.0, 0, 1.0, 0.0)] * 5, device)
    given["seeds"] = torch.tensor([1, 2, 1 + 2**32, 1, 1], device=device)
    given["positions"] = torch.tensor([9, 9, 9, 10, 9 + 2**32], device=device)
    for draw in (by_reference, by_kernel):
        assert len(set(draw(logits, given).tolist())) == 5


LOGITS = [1.5, 0.3, -0.8, 2.0, 0.0, 1.0, -2.5, 0.7]
NUM_DRAWS = 200_000


def p_value(tokens: torch.Tensor, probabilities: dict[int, float]) -> float:
    """Of Pearson's chi-square test of `tokens` against a law over ids below 8."""
    counts = torch.bincount(tokens.cpu().long(), minlength=8).double()
    expected = torch.tensor([probabilities.get(i, 0.0) for i in range(8)], dtype=torch.float64) * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    legal = expected > 0
    assert expected[legal].min() > 5, "too few draws for the test"
    statistic = ((counts - expected)[legal].square() / expected[legal]).sum()
    freedom = torch.tensor((int(legal.sum()) - 1) / 2, dtype=torch.float64)
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize(
    "setting",
    [
        (0.5, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (1.5, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (0.5, 6, 0.9, 0.05),
    ],
)
@pytest.mark.parametrize("varies", ["positions", "seeds"])
def test_draws_have_the_law(setting, varies: str, device: str) -> None:
    given = {name: x.expand(NUM_DRAWS).contiguous() for name, x in parameters([setting], device).items()}
    given[varies] = torch.arange(NUM_DRAWS, device=device)
    logits = torch.tensor(LOGITS, device=device).expand(NUM_DRAWS, 8)
    want = law(torch.tensor(LOGITS).tolist(), *setting)
    tokens = sampled_tokens(logits, **given)
    assert p_value(tokens, want) > 0.001
    # The test's own power: neither the temperature nor a filter may be missing.
    hotter = dict(given, temperatures=given["temperatures"] * 1.1)
    assert p_value(sampled_tokens(logits, **hotter), want) < 1e-6
    if setting[1:] != (0, 1.0, 0.0):
        unfiltered = {
            "top_ks": torch.zeros_like(given["top_ks"]),
            "top_ps": torch.ones_like(given["top_ps"]),
            "min_ps": torch.zeros_like(given["min_ps"]),
        }
        assert p_value(sampled_tokens(logits, **{**given, **unfiltered}), want) < 1e-6


def test_neighbouring_positions_and_ids_are_drawn_independently(device: str) -> None:
    given = {
        name: x.expand(NUM_DRAWS).contiguous() for name, x in parameters([(1.0, 0, 1.0, 0.0)], device).items()
    }
    given["positions"] = torch.arange(NUM_DRAWS, device=device)
    tokens = sampled_tokens(torch.zeros(NUM_DRAWS, 8, device=device), **given)
    uniform = dict.fromkeys(range(8), 1 / 8)
    assert p_value(tokens, uniform) > 0.001
    # The difference of two independent uniform draws is uniform modulo 8.
    assert p_value((tokens[1:] - tokens[:-1]) % 8, uniform) > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 17, 1000, 4099])
def test_rows_that_filter_nothing_draw_alike_in_one_kernel(
    vocab: int, dtype: torch.dtype, device: str
) -> None:
    settings = [(temperature, 0, 1.0, 0.0) for temperature in (0.0, 0.3, 1.0, 2.5)] * 2
    logits, given = hostile_logits(vocab, len(settings), dtype, device), parameters(settings, device)
    logits[4, vocab // 2] = torch.nan
    logits[5] = -torch.inf
    tokens = by_plain_kernel(logits, given).tolist()
    assert tokens[4] == -1
    assert tokens == by_reference(logits, given).tolist() == by_kernel(logits, given).tolist()
    exact = oracle(logits.nan_to_num(nan=0.0, neginf=-torch.inf), given)
    assert tokens[:4] + tokens[5:] == exact[:4] + exact[5:]


def test_outputs_and_workspace_are_the_callers_and_serve_call_after_call(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    workspace = torch.zeros(workspace_shape(8), dtype=torch.int64, device=device)
    tokens = torch.full((8,), 12345, dtype=torch.int32, device=device)
    # Each call's logits are lower than those before it: a maximum left behind would win.
    for rows, vocab, peak in ((8, 9000, 50.0), (3, 5000, -1.0), (8, 100, -70.0)):
        logits = torch.full((rows, vocab), -900.0, device=device)
        places = [(7 * row + vocab // 2) % vocab for row in range(rows)]
        logits[range(rows), places] = peak
        given = parameters(list(SETTINGS[1 : 1 + rows]), device)
        returned = sampled_tokens(logits, **given, tokens=tokens[:rows], workspace=workspace)
        assert returned.data_ptr() == tokens.data_ptr()
        assert tokens[:rows].tolist() == places
        assert not workspace.any()


@pytest.mark.parametrize("name", ["seeds", "positions", "temperatures", "top_ks", "top_ps", "min_ps"])
def test_parameters_of_another_type_or_size_are_refused_by_name(name: str, device: str) -> None:
    logits = torch.zeros(4, 10, device=device)
    given = parameters([(1.0, 0, 1.0, 0.0)] * 4, device)
    for wrong in (given[name][:3], given[name].half(), given[name].repeat_interleave(2)[::2]):
        with pytest.raises(AssertionError, match=name):
            sampled_tokens(logits, **{**given, name: wrong})
