"""Benchmarks of the ops that stream rows: scores of draft logits, choice of tokens, compaction of a window.

See entry.py for the legend; L layers, R rows (moved rows of a request), percent 100 * top_p.
"""

from __future__ import annotations

import importlib

import torch

from trtllm_tree.bench.ops.entry import (
    Baseline,
    Call,
    Case,
    Cost,
    OpBench,
    Workload,
    normal,
    random_parents,
)
from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.kernels.greedy_tokens import greedy_tokens
from trtllm_tree.kernels.greedy_tokens import workspace_shape as greedy_workspace_shape
from trtllm_tree.kernels.logprob_topk import logprob_topk, workspace_shape
from trtllm_tree.kernels.rejection_tokens import rejection_tokens
from trtllm_tree.kernels.sampled_tokens import gathered_shape, sampled_tokens
from trtllm_tree.kernels.sampled_tokens import workspace_shape as sampled_workspace_shape

KV_HEADS, HEAD_DIM, PAGE = 8, 128, 64
_WORD = 4


def _topk_cost(case: Case) -> Cost:
    return Cost(case["R"] * (case["V"] * case.torch_dtype.itemsize + case["K"] * 2 * _WORD))


def _topk(case: Case, sets: int, generator: torch.Generator) -> Workload:
    rows, vocab, topk = case["R"], case["V"], case["K"]
    logits = [normal(generator, (rows, vocab), case.torch_dtype) for _ in range(sets)]
    workspace = torch.zeros(workspace_shape(rows, vocab), device=generator.device)

    def call_on(logits: torch.Tensor) -> Call:
        scores = logits.new_empty((rows, topk), dtype=torch.float32)
        ids = logits.new_empty((rows, topk), dtype=torch.int32)
        return lambda: logprob_topk(logits, topk, scores=scores, ids=ids, workspace=workspace)[0]

    def softmax_first(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(topk).values

    def topk_first(logits: torch.Tensor) -> torch.Tensor:
        best = logits.topk(topk).values.float()
        return best - torch.logsumexp(logits.float(), dim=-1, keepdim=True)

    return Workload(
        [call_on(x) for x in logits],
        {
            "torch log_softmax + topk": Baseline(
                lambda: [lambda x=x: softmax_first(x) for x in logits], 1e-3
            ),
            "torch topk + logsumexp": Baseline(lambda: [lambda x=x: topk_first(x) for x in logits], 1e-3),
        },
    )


def _greedy_cost(case: Case) -> Cost:
    return Cost(case["R"] * (case["V"] * case.torch_dtype.itemsize + _WORD))


def _greedy(case: Case, sets: int, generator: torch.Generator) -> Workload:
    rows, vocab, device = case["R"], case["V"], generator.device
    logits = [normal(generator, (rows, vocab), case.torch_dtype) for _ in range(sets)]
    for row in logits:
        # torch leaves open which of several equal logits it names, so one is made the best.
        best = torch.randint(vocab, (rows, 1), generator=generator, device=device)
        row.scatter_(1, best, 100.0)

    def call_on(logits: torch.Tensor) -> Call:
        tokens = logits.new_empty(rows, dtype=torch.int32)
        workspace = logits.new_zeros(greedy_workspace_shape(rows), dtype=torch.int64)
        return lambda: greedy_tokens(logits, tokens=tokens, workspace=workspace)

    return Workload(
        [call_on(x) for x in logits],
        {"torch argmax": Baseline(lambda: [lambda x=x: x.argmax(dim=-1) for x in logits], 0.0)},
    )


def _sampled_cost(case: Case) -> Cost:
    # Seed and position are two words each, the four parameters and the token one.
    return Cost(case["R"] * (case["V"] * case.torch_dtype.itemsize + 9 * _WORD))


def _parameters(case: Case, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Of rows that all sample by the case's top-k and top-p."""
    return {
        "seeds": torch.arange(rows, device=device),
        "positions": torch.arange(rows, device=device),
        "temperatures": torch.ones(rows, device=device),
        "top_ks": torch.full((rows,), case["K"], dtype=torch.int32, device=device),
        "top_ps": torch.full((rows,), case["percent"] / 100, device=device),
        "min_ps": torch.zeros(rows, device=device),
    }


def _filters(case: Case) -> bool:
    return bool(case["K"] or case["percent"] < 100)


def _row_buffers(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "workspace": logits.new_zeros(sampled_workspace_shape(len(logits)), dtype=torch.int64),
        "gathered": logits.new_empty(gathered_shape(len(logits)), dtype=torch.int64),
    }


def _rejection_cost(case: Case) -> Cost:
    # As a draw, and each row's candidate and parent.
    return Cost(case["B"] * case["N"] * (case["V"] * case.torch_dtype.itemsize + 11 * _WORD))


def _rejection(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, vocab = case["B"], case["N"], case["V"]
    rows, device = batch * nodes, generator.device
    logits = [normal(generator, (rows, vocab), case.torch_dtype) for _ in range(sets)]
    parents = random_parents(generator, batch, nodes)
    candidates = torch.randint(vocab, (batch, nodes), dtype=torch.int32, generator=generator, device=device)
    parameters = _parameters(case, rows, device)

    def call_on(logits: torch.Tensor) -> Call:
        tokens = logits.new_empty(rows, dtype=torch.int32)
        buffers = _row_buffers(logits)
        return lambda: rejection_tokens(logits, candidates, parents, **parameters, tokens=tokens, **buffers)

    def plain_draw(logits: torch.Tensor) -> Call:
        tokens = logits.new_empty(rows, dtype=torch.int32)
        buffers = _row_buffers(logits)
        return lambda: sampled_tokens(logits, **parameters, tokens=tokens, **buffers, filters=_filters(case))

    def probabilities(logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1, dtype=torch.float32)

    # Neither does the same job: what a draw without children costs, and what rejection on probabilities begins with.
    return Workload(
        [call_on(x) for x in logits],
        {
            "op sampled_tokens": Baseline(lambda: [plain_draw(x) for x in logits]),
            "softmax of torch": Baseline(lambda: [lambda x=x: probabilities(x) for x in logits]),
        },
    )


def _sampled(case: Case, sets: int, generator: torch.Generator) -> Workload:
    rows, vocab, top_k, device = case["R"], case["V"], case["K"], generator.device
    top_p = case["percent"] / 100
    logits = [normal(generator, (rows, vocab), case.torch_dtype) for _ in range(sets)]
    parameters, filters = _parameters(case, rows, device), _filters(case)

    def call_on(logits: torch.Tensor) -> Call:
        tokens = logits.new_empty(rows, dtype=torch.int32)
        buffers = _row_buffers(logits)
        return lambda: sampled_tokens(logits, **parameters, tokens=tokens, **buffers, filters=filters)

    def gumbel(logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() - torch.empty_like(logits, dtype=torch.float32).exponential_().log_()).argmax(
            dim=-1
        )

    def by_sorting(logits: torch.Tensor) -> torch.Tensor:
        # Of a top-k, only that many are sorted; of a top-p alone, all.
        best, ids = logits.float().topk(top_k or vocab)
        probabilities = best.softmax(dim=-1)
        behind = probabilities.cumsum(dim=-1) - probabilities
        kept = torch.where(behind < top_p, probabilities, 0.0)
        return ids.gather(1, kept.multinomial(1)).squeeze(1)

    def flashinfer() -> list[Call]:
        sampling = importlib.import_module("flashinfer.sampling")
        # It takes float32 only; the cast is part of the job.
        if is_plain:
            return [lambda x=x: sampling.sampling_from_logits(x.float()) for x in logits]
        draw, count = sampling.top_k_top_p_sampling_from_logits, top_k or vocab
        return [lambda x=x: draw(x.float(), count, top_p) for x in logits]

    # Each draws with noise of its own: equal in law, not in tokens.
    is_plain = top_k == 0 and top_p == 1
    name, torch_draw = ("Gumbel", gumbel) if is_plain else ("sort", by_sorting)
    return Workload(
        [call_on(x) for x in logits],
        {
            f"{name} of torch": Baseline(lambda: [lambda x=x: torch_draw(x) for x in logits]),
            "FlashInfer sampling": Baseline(flashinfer),
        },
    )


def _compact_cost(case: Case) -> Cost:
    row_bytes = KV_HEADS * HEAD_DIM * case.torch_dtype.itemsize
    moved = 2 * case["L"] * case["B"] * case["R"] * row_bytes * (not case["identity"])
    # The path with its root; a slot is looked up for each end of a move.
    index = case["B"] * _WORD * (case["R"] + 1 + 2 * case["R"] * (not case["identity"]))
    return Cost(2 * moved + index)


def _compact(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, layers, moved, device = case["B"], case["L"], case["R"], generator.device
    nodes, depth = case["N"], moved + 1
    # An identity path touches next to nothing, which would ask for many sets of whole caches.
    sets = 2 if case["identity"] else sets
    shape = (2 * layers, batch, KV_HEADS, PAGE, HEAD_DIM)
    caches = [normal(generator, shape, case.torch_dtype) for _ in range(sets)]
    pages = torch.randperm(batch, generator=generator, device=device)
    slots = (pages.unsqueeze(1) * PAGE + torch.arange(nodes, device=device)).int()
    nodes_kept = torch.arange(depth, dtype=torch.int32, device=device) * (1 if case["identity"] else 2)
    path = torch.full((batch, nodes), -1, dtype=torch.int32, device=device)
    path[:, :depth] = nodes_kept
    sources = slots[:, nodes_kept.long()][:, 1:].flatten().long()
    targets = slots[:, 1:depth].flatten().long()

    def call_on(cache: torch.Tensor) -> Call:
        table = RowTable.build([cache.unbind()])

        def run() -> torch.Tensor:
            compact_window_rows(table, slots[None], path, max_depth=depth)
            return cache

        return run

    def per_layer(cache: torch.Tensor) -> Call:
        # Rows of one slot lie together here: the layout in which torch can move them by one index.
        flat = cache.transpose(2, 3).flatten(1, 2).contiguous()
        # index_copy_ knows no float8.
        regions = (flat.view(torch.uint8) if flat.element_size() == 1 else flat).unbind()
        as_cache = flat.unflatten(1, (batch, PAGE)).transpose(2, 3)

        def run() -> torch.Tensor:
            for region in regions:
                region.index_copy_(0, targets, region.index_select(0, sources))
            return as_cache

        return run

    return Workload(
        [call_on(cache) for cache in caches],
        {"torch index_copy per layer": Baseline(lambda: [per_layer(cache) for cache in caches])},
    )


def _logit_cases(*shapes: tuple[int, int, int]) -> tuple[Case, ...]:
    return tuple(Case({"R": r, "V": v, "K": k}, "bfloat16") for r, v, k in shapes)


def _compact_case(layers: int, batch: int, rows: int, dtype: str = "bfloat16", identity: int = 0) -> Case:
    return Case({"L": layers, "B": batch, "N": 32, "R": rows, "identity": identity}, dtype)


_SPECULATIVE_TESTS = ("tests/kernels/test_tree_speculative.py",)
ROW_OPS = (
    OpBench(
        "logprob_topk",
        ("tests/kernels/test_logprob_topk.py",),
        _logit_cases((32, 32000, 4), (4, 32000, 4), (256, 32000, 8), (32, 151936, 4), (512, 151936, 16)),
        _topk_cost,
        _topk,
    ),
    OpBench(
        "greedy_tokens",
        ("tests/kernels/test_greedy_tokens.py",),
        tuple(Case({"R": r, "V": 128256}, "bfloat16") for r in (256, 32, 1024)),
        _greedy_cost,
        _greedy,
    ),
    OpBench(
        "sampled_tokens",
        ("tests/kernels/test_sampled_tokens.py",),
        tuple(
            Case({"R": r, "V": 128256, "K": k, "percent": percent}, "bfloat16")
            for r, k, percent in ((1024, 0, 100), (1024, 50, 95), (1024, 0, 95), (32, 0, 100), (32, 50, 95))
        ),
        _sampled_cost,
        _sampled,
    ),
    OpBench(
        "rejection_tokens",
        ("tests/kernels/test_rejection_tokens.py", "tests/sampling/test_laws.py"),
        tuple(
            Case({"B": b, "N": 32, "V": 128256, "K": k, "percent": percent}, "bfloat16")
            for b, k, percent in ((32, 0, 100), (32, 50, 95), (1, 0, 100))
        ),
        _rejection_cost,
        _rejection,
    ),
    OpBench(
        "compact_window_rows",
        (*_SPECULATIVE_TESTS, "tests/kernels/test_compact_groups.py"),
        (
            _compact_case(80, 32, 8),
            _compact_case(80, 32, 8, identity=1),
            _compact_case(80, 32, 8, "float8_e4m3fn"),
            _compact_case(80, 8, 8),
            _compact_case(80, 1, 8),
            _compact_case(32, 8, 5),
        ),
        _compact_cost,
        _compact,
        num_quick=2,
    ),
)
