"""Benchmarks of the small tree ops: ancestors, expand, select, verify, window, window slots.

They move kilobytes: what is measured is the latency of one launch. See entry.py for the legend.
"""

from __future__ import annotations

import torch

from trtllm_tree.bench.ops.entry import (
    Baseline,
    Call,
    Case,
    Cost,
    OpBench,
    Workload,
    normal,
    page_table,
    random_ids,
    random_parents,
)
from trtllm_tree.kernels.accepted_rows import LaneRows, accepted_rows
from trtllm_tree.kernels.chain_window import chain_window
from trtllm_tree.kernels.draft_tree_expand import draft_tree_expand, first_entry
from trtllm_tree.kernels.draft_tree_select import draft_tree_select
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.kernels.verify_tree import verify_tree
from trtllm_tree.kernels.window_slots import window_slots

_WORD = 4
_PAGE = 64


def _words(bits: int) -> int:
    return max(1, -(-bits // 64))


def _ancestors_cost(case: Case) -> Cost:
    nodes = case["B"] * case["N"]
    return Cost(nodes * (2 * _WORD + 8 * _words(case["N"])))


def _ancestors(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes = case["B"], case["N"]

    def call_on(parents: torch.Tensor) -> Call:
        depths = torch.empty_like(parents)
        mask = parents.new_empty((batch, nodes, _words(nodes)), dtype=torch.int64)
        return lambda: tree_ancestors(parents, depths=depths, ancestor_mask=mask)

    return Workload([call_on(random_parents(generator, batch, nodes)) for _ in range(sets)])


def _expand_cost(case: Case) -> Cost:
    batch, topk, size = case["B"], case["K"], case["H"] * case.torch_dtype.itemsize
    window = (case["S"] - 1) * topk
    children = 2 * topk * topk * _WORD + 3 * topk * topk * _WORD
    lanes = topk * (2 * _WORD + 3 * _WORD + 2 * 8 * _words(window))
    return Cost(batch * (children + lanes + 2 * topk * size))


def _expand(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, topk, steps, hidden_size = (case[name] for name in ("B", "K", "S", "H"))
    device, window, step = generator.device, (steps - 1) * topk, steps - 1
    entries = first_entry(steps, topk)

    def call_on(scores: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> Call:
        state = {
            "entry_scores": torch.zeros(batch, entries, device=device),
            "entry_tokens": torch.zeros(batch, entries, dtype=torch.int32, device=device),
            "entry_parents": torch.zeros(batch, entries, dtype=torch.int32, device=device),
            "lane_entries": torch.arange(topk, dtype=torch.int32, device=device).repeat(batch, 1),
            "lane_scores": torch.zeros(batch, topk, device=device),
            "lane_tokens": torch.zeros(batch, topk, dtype=torch.int32, device=device),
            "lane_mask": torch.ones(batch, topk, _words(window), dtype=torch.int64, device=device),
            "next_hidden": torch.empty_like(hidden),
        }
        return lambda: draft_tree_expand(scores, tokens, hidden, step=step, window=window, **state)

    calls = []
    for _ in range(sets):
        scores = -torch.rand(batch, topk, topk, generator=generator, device=device)
        tokens = random_ids(generator, (batch, topk, topk), 1000)
        calls.append(call_on(scores, tokens, normal(generator, (batch, topk, hidden_size), case.torch_dtype)))
    return Workload(calls)


def _select_cost(case: Case) -> Cost:
    entries = first_entry(case["S"], case["K"])
    return Cost(case["B"] * _WORD * (3 * entries + 1 + 3 * case["N"]))


def _select(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, topk = case["B"], case["N"], case["K"]
    device, entries = generator.device, first_entry(case["S"], topk)
    steps = torch.arange(entries, device=device).sub(topk).div(topk * topk, rounding_mode="floor")
    before = torch.where(steps < 0, 0, topk + steps.clamp(min=0) * topk * topk)

    def call_on(scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> Call:
        root = torch.zeros(batch, dtype=torch.int32, device=device)
        outputs = {
            "tokens": root.new_empty(batch, nodes),
            "parents": root.new_empty(batch, nodes),
            "node_scores": scores.new_empty(batch, nodes),
        }
        return lambda: draft_tree_select(scores, tokens, parents, root, num_nodes=nodes, **outputs)

    calls = []
    for _ in range(sets):
        # A parent is a random entry of an earlier step, and a child scores less the later its step.
        draw = torch.rand(2, batch, entries, generator=generator, device=device)
        parents = torch.where(before == 0, -1, (draw[0] * before).long()).int()
        scores = -draw[1] - (steps + 1).float()
        calls.append(call_on(scores, random_ids(generator, (batch, entries), 1000), parents))
    return Workload(calls)


def _verify_cost(case: Case) -> Cost:
    return Cost(case["B"] * _WORD * (5 * case["N"] + 1))


def _verify(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes = case["B"], case["N"]

    def call_on(tokens: torch.Tensor, parents: torch.Tensor, target: torch.Tensor) -> Call:
        outputs = {
            "path": torch.empty_like(tokens),
            "predict": torch.empty_like(tokens),
            "accept_len": tokens.new_empty(batch),
        }
        return lambda: verify_tree(tokens, parents, target, **outputs)

    calls = []
    for _ in range(sets):
        # Few tokens, so that paths are long.
        tokens, target = (random_ids(generator, (batch, nodes), 3) for _ in range(2))
        calls.append(call_on(tokens, random_parents(generator, batch, nodes), target))
    return Workload(calls)


def _accepted_cost(case: Case) -> Cost:
    steps = case["W"] - 2  # with lanes
    lanes = steps * (8 + _WORD * case["K"]) + _WORD * -(-steps * case["K"] // _PAGE)
    return Cost(case["B"] * (_WORD * (2 * case["W"] + 7) + lanes))


def _accepted(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, steps = case["B"], case["N"], case["W"] - 2
    table = page_table(generator, batch, 1 + -(-(2 * case["W"] + steps * case["K"]) // _PAGE))

    def call_on(predict: torch.Tensor, accept_len: torch.Tensor) -> Call:
        roots, frontier = predict.new_empty(batch), predict.new_empty(batch)
        last_rows = predict.new_empty(batch, dtype=torch.int64)
        tokens = predict.new_empty(batch, case["W"])
        positions = last_rows.new_empty(batch, steps)
        lanes = LaneRows(positions, predict.new_empty(batch, steps * case["K"]), table, _PAGE)
        return lambda: accepted_rows(
            predict,
            accept_len,
            accept_len,
            tokens=tokens,
            last_rows=last_rows,
            roots=roots,
            frontier=frontier,
            lanes=lanes,
        )

    calls = []
    for _ in range(sets):
        accept_len = random_ids(generator, (batch,), case["W"]) + 1
        calls.append(call_on(random_ids(generator, (batch, nodes), 1000), accept_len))
    return Workload(calls)


def _window_cost(case: Case) -> Cost:
    return Cost(case["B"] * (8 + _WORD + case["N"] * (2 * _WORD + 8)))


def _window(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, device = case["B"], case["N"], generator.device
    index = torch.arange(nodes, device=device)
    baseline_positions = torch.empty(batch, nodes, dtype=torch.int64, device=device)

    def call_on(token_map: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> Call:
        tokens = lens.new_empty(batch, nodes)
        positions = slots.new_empty(batch, nodes)

        def run() -> torch.Tensor:
            chain_window(token_map, slots, lens, tokens=tokens, positions=positions)
            return tokens

        return run

    def in_torch(token_map: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        torch.add(lens.unsqueeze(1), index, out=baseline_positions)
        return token_map[slots]

    inputs = [
        (
            random_ids(generator, (2 * batch, nodes), 1000),
            torch.randperm(2 * batch, generator=generator, device=device)[:batch],
            random_ids(generator, (batch,), 1000),
        )
        for _ in range(sets)
    ]
    in_torch_calls: list[Call] = [lambda given=given: in_torch(*given) for given in inputs]
    return Workload(
        [call_on(*given) for given in inputs],
        {"torch gather": Baseline(lambda: in_torch_calls, tolerance=0.0)},
    )


def _slots_cost(case: Case) -> Cost:
    touched = -(-case["N"] // _PAGE)
    return Cost(case["B"] * _WORD * (1 + touched + case["N"]))


def _slots(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, rows = case["B"], case["N"]
    device, max_pages = generator.device, 64 + -(-rows // _PAGE)
    index = torch.arange(rows, dtype=torch.int32, device=device)

    def call_on(first: torch.Tensor, table: torch.Tensor) -> Call:
        slots = first.new_empty(batch, rows)
        return lambda: window_slots(first, table, num_rows=rows, page_size=_PAGE, slots=slots)

    def in_torch(first: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        positions = first.unsqueeze(1) + index
        return table.gather(1, (positions // _PAGE).long()) * _PAGE + positions % _PAGE

    inputs = [
        (random_ids(generator, (batch,), 64 * _PAGE), page_table(generator, batch, max_pages))
        for _ in range(sets)
    ]
    in_torch_calls: list[Call] = [lambda pair=pair: in_torch(*pair) for pair in inputs]
    return Workload(
        [call_on(*pair) for pair in inputs],
        {"torch gather": Baseline(lambda: in_torch_calls, tolerance=0.0)},
    )


def _cases(*shapes: dict[str, int], dtype: str = "int32") -> tuple[Case, ...]:
    return tuple(Case(shape, dtype) for shape in shapes)


_TREE_TESTS = ("tests/kernels/test_draft_tree_kernels.py",)
TREE_OPS = (
    OpBench(
        "tree_ancestors",
        ("tests/kernels/test_tree_ancestors.py",),
        _cases(*({"B": b, "N": n} for b, n in ((8, 32), (1, 32), (32, 64), (8, 256)))),
        _ancestors_cost,
        _ancestors,
    ),
    OpBench(
        "draft_tree_expand",
        _TREE_TESTS,
        _cases(
            *(
                {"B": b, "K": k, "S": s, "H": 4096}
                for b, k, s in ((8, 4, 5), (1, 4, 5), (32, 8, 6), (8, 16, 8))
            ),
            dtype="bfloat16",
        ),
        _expand_cost,
        _expand,
    ),
    OpBench(
        "draft_tree_select",
        _TREE_TESTS,
        _cases(
            *(
                {"B": b, "K": k, "S": s, "N": n}
                for b, k, s, n in ((8, 4, 5, 32), (1, 4, 5, 32), (32, 8, 6, 64), (8, 16, 8, 256))
            ),
            dtype="float32",
        ),
        _select_cost,
        _select,
    ),
    OpBench(
        "verify_tree",
        ("tests/kernels/test_tree_speculative.py",),
        _cases(*({"B": b, "N": n} for b, n in ((8, 32), (1, 32), (32, 64), (8, 256)))),
        _verify_cost,
        _verify,
    ),
    OpBench(
        "accepted_rows",
        ("tests/kernels/test_accepted_rows.py",),
        _cases(
            *(
                {"B": b, "N": n, "W": w, "K": k}
                for b, n, w, k in ((8, 32, 6, 4), (1, 32, 6, 4), (32, 64, 9, 8))
            )
        ),
        _accepted_cost,
        _accepted,
    ),
    OpBench(
        "chain_window",
        ("tests/kernels/test_chain_window.py",),
        _cases(*({"B": b, "N": n} for b, n in ((8, 32), (1, 32), (32, 64)))),
        _window_cost,
        _window,
    ),
    OpBench(
        "window_slots",
        ("tests/kernels/test_window_slots.py",),
        _cases(*({"B": b, "N": n} for b, n in ((8, 32), (1, 32), (32, 64)))),
        _slots_cost,
        _slots,
    ),
)
