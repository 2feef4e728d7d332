"""logprob_topk, as torch reference and as Triton kernels, against a Python sort of every row."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_tree.kernels.logprob_topk import GROUP, TILE, logprob_topk, workspace_shape

INF, NAN = math.inf, math.nan

# Triton's interpreter warns where IEEE arithmetic gives an infinity or NaN; here that is the point.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["reference", "triton"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", request.param)


def oracle(row: list[float], k: int) -> tuple[list[float], list[int]]:
    """The k best of one row, in float64."""
    ids = sorted(range(len(row)), key=lambda i: (INF if math.isnan(row[i]) else -row[i], i))[:k]
    if any(math.isnan(x) or x == INF for x in row):
        return [NAN] * k, ids
    top = max(row)
    if top == -INF:
        return [-INF] * k, ids
    log_total = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return [row[i] - log_total for i in ids], ids


def check(logits: torch.Tensor, k: int, d2t: torch.Tensor | None = None) -> None:
    """Run with every output and the workspace given and full of garbage, and compare every element."""
    num_rows, vocab_size = logits.shape
    scores = torch.full((num_rows, k + 1), 7.0, device=logits.device)[:, :k]
    ids = torch.full((num_rows, k + 2), -7, dtype=torch.int32, device=logits.device)[:, :k]
    rows, columns = workspace_shape(num_rows, vocab_size)
    workspace = torch.full((rows + 1, columns + 3), NAN, device=logits.device)
    workspace[:, 0] = 0  # the counters
    logprob_topk(logits, k, d2t=d2t, scores=scores, ids=ids, workspace=workspace)
    offsets = [0] * vocab_size if d2t is None else d2t.tolist()
    for r, row in enumerate(logits.float().tolist()):
        true_scores, true_ids = oracle(row, k)
        assert ids[r].tolist() == [i + offsets[i] for i in true_ids]
        assert scores[r].tolist() == pytest.approx(true_scores, abs=2e-5, nan_ok=True)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "k", "dtype"),
    [
        (1, 1, 1, torch.float32),
        (2, 16, 16, torch.float32),
        (2, GROUP + 1, 3, torch.bfloat16),
        (2, 10 * GROUP - 1, 16, torch.float16),
        (3, TILE + 1, 2, torch.float32),
        (2, 2 * TILE + 7, 8, torch.bfloat16),
    ],
)
def test_the_best_logits_come_with_their_log_probabilities(num_rows, vocab_size, k, dtype, device):
    generator = torch.Generator().manual_seed(vocab_size)
    # The columns past the vocabulary would win if they were read.
    padded = torch.full((num_rows, vocab_size + 5), INF, dtype=dtype, device=device)
    logits = padded[:, :vocab_size]
    logits.copy_(torch.randn(num_rows, vocab_size, generator=generator) * 4)
    check(logits, k)


def test_exact_ties_go_to_the_lower_id_within_and_across_groups_and_tiles(device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 3, (4, 2 * TILE + 100), generator=generator).float()
    logits[1] = 1.5
    logits[2, [0, GROUP - 1, GROUP, TILE - 1, TILE, 2 * TILE + 99]] = 9.0
    # -0.0 equals 0.0.
    logits[3] = torch.where(torch.arange(logits.shape[1]) % 2 == 0, 0.0, -0.0)
    check(logits.to(device), 5)


def test_logits_that_differ_in_the_last_bit_keep_their_order(device):
    logits = torch.full((1, 3 * GROUP), -2.0)
    logits[0, [5, 70, 130, 131]] = torch.tensor([20.0, 20.000002, 20.000004, 20.000002])
    assert logits[0, [5, 70, 130]].unique().numel() == 3
    check(logits.to(device), 4)


def test_minus_infinity_scores_minus_infinity_on_distinct_ascending_ids(device):
    logits = torch.full((2, TILE + 2 * GROUP), -INF)
    logits[0, [TILE + 3, 9]] = torch.tensor([2.0, -1.0])
    check(logits.to(device), 4)


@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_row_without_a_normaliser_scores_nan_on_distinct_ids_in_range(poison, device):
    logits = torch.randn(3, TILE + 50, generator=torch.Generator().manual_seed(2))
    logits[0, TILE + 20] = poison
    logits[1] = poison
    check(logits.to(device), 4)


def test_draft_ids_become_target_ids_by_adding_the_offset(device):
    generator = torch.Generator().manual_seed(3)
    d2t = torch.randint(0, 100_000, (300,), generator=generator).to(device)
    check(torch.randn(2, 300, generator=generator).to(device), 6, d2t)


def test_a_large_vocabulary_with_a_last_tile_of_one_id(device):
    logits = torch.randn(1, 32 * TILE + 1, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    logits[0, [32 * TILE, 17, 20 * TILE]] = 9.0
    check(logits.to(device), 4)


def test_rows_further_apart_than_32_bits_are_found(device):
    # Never touched between the rows, so this is address space rather than memory.
    stride = 2**30 + 8
    try:
        storage = torch.empty(2 * stride + 100, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 4 GiB: {error}")
    logits = storage.as_strided((3, 100), (stride, 1))
    logits.copy_(torch.randn(3, 100, generator=torch.Generator().manual_seed(5)))
    check(logits, 2)


def test_outputs_are_allocated_when_not_given(device):
    scores, ids = logprob_topk(torch.tensor([[1.0, 3.0, 2.0]], device=device), 2)
    assert ids.tolist() == [[1, 2]]
    assert scores[0].tolist() == pytest.approx([-0.40760596, -1.40760596])
