"""The op benchmark, all but its timing: coverage, floors, inputs, baselines, refusals."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from tests.oracles import trees
from trtllm_tree.bench import ops
from trtllm_tree.bench.ops import gate
from trtllm_tree.bench.ops.entry import (
    Baseline,
    Call,
    Case,
    Ceilings,
    Cost,
    OpBench,
    Workload,
    random_parents,
)
from trtllm_tree.bench.ops.flashinfer_calls import visible_keys, xqa_mask
from trtllm_tree.bench.ops.registry import NOT_MEASURED, REGISTRY, entries
from trtllm_tree.bench.ops.round_glue import RoundRig
from trtllm_tree.bench.ops.timing import ceilings_of, graph_passes
from trtllm_tree.cli.main import main
from trtllm_tree.errors import ConfigError
from trtllm_tree.kernels.tree_ancestors import tree_ancestors

ROOT = Path(__file__).parents[2]
H200 = ceilings_of("NVIDIA H200", Ceilings(1.0, 1.0))
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")

# Benchmarks of several ops: of a round, without its models.
ROUNDS = {"round_glue", "drafting_glue"}
# Second forms of an op, whose folder another entry measures.
FORMS = {"tree_window_attention_mla", "tree_decode_mla"}
# Every op at a size that its torch reference runs in no time.
_HEADS = {"Hq": 4, "Hkv": 2, "D": 16, "page": 16}
TINY = {
    "tree_window_attention": Case({"B": 2, "N": 5, "P": 37, "causal": 1, "hot": 0, **_HEADS}, "bfloat16"),
    "tree_decode_mla": Case({"B": 2, "N": 5, "P": 37, "Hq": 4, "Dv": 16, "rope": 8, "page": 16}, "bfloat16"),
    "tree_window_attention_mla": Case(
        {"B": 2, "N": 5, "P": 37, "causal": 1, "Hq": 4, "Dv": 16, "rope": 8, "page": 16}, "bfloat16"
    ),
    "tree_decode": Case({"B": 2, "N": 5, "P": 37, "fp8_query": 0, **_HEADS}, "bfloat16"),
    "logprob_topk": Case({"R": 3, "V": 300, "K": 4}, "bfloat16"),
    "greedy_tokens": Case({"R": 3, "V": 300}, "bfloat16"),
    "sampled_tokens": Case({"R": 3, "V": 300, "K": 20, "percent": 95}, "bfloat16"),
    "rejection_tokens": Case({"B": 2, "N": 5, "V": 300, "K": 20, "percent": 95}, "bfloat16"),
    "compact_window_rows": Case({"L": 2, "B": 2, "N": 12, "R": 4, "identity": 0}, "bfloat16"),
    "tree_ancestors": Case({"B": 2, "N": 9}),
    "draft_tree_expand": Case({"B": 2, "K": 3, "S": 3, "H": 8}, "bfloat16"),
    "draft_tree_select": Case({"B": 2, "K": 3, "S": 3, "N": 9}, "float32"),
    "verify_tree": Case({"B": 2, "N": 9}),
    "accepted_rows": Case({"B": 2, "N": 9, "W": 4, "K": 3}),
    "chain_window": Case({"B": 2, "N": 9}),
    "window_slots": Case({"B": 2, "N": 9}),
    "round_glue": Case(
        {"B": 2, "K": 4, "S": 3, "N": 16, "L": 2, "H": 8, "F": 24, "Vd": 50, "V": 60}, "bfloat16"
    ),
}
TINY["drafting_glue"] = TINY["round_glue"]
STILL = Case({**TINY["compact_window_rows"].shape, "identity": 1}, "bfloat16")


def test_every_kernel_folder_is_measured_or_left_out_with_a_reason():
    folders = {path.parent.name for path in (ROOT / "trtllm_tree" / "kernels").glob("*/__init__.py")}
    assert folders == (set(REGISTRY) | set(NOT_MEASURED)) - ROUNDS - FORMS
    assert not set(REGISTRY) & set(NOT_MEASURED)
    assert set(TINY) == set(REGISTRY)


@pytest.mark.parametrize("op", REGISTRY)
def test_an_ops_tests_exist_and_speak_of_it(op):
    path = ROOT / REGISTRY[op].tests[0]
    text = path.read_text(encoding="utf-8")
    assert any(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.parse(text).body
    )
    assert ("SpecRound" if op in ROUNDS else op) in text


def test_the_floor_of_a_large_decode_is_its_bytes():
    # 2 x 8 requests x (32768 + 32) keys x 8 heads x 128 x 2 bytes, query and output 2 x 8 x 32 x 32 x 128 x 2,
    # and one mask word for each of 8 x 32 rows.
    cost = REGISTRY["tree_decode"].cost(decode_case(nodes=32))
    assert cost.bytes_moved == 1_074_790_400 + 4_194_304 + 2_048
    assert cost.flops == 4 * 8 * 32 * 32 * 128 * 32_800
    assert H200.floor_us(cost) == pytest.approx(1_078_986_752 / 4.3e6)


def test_the_floor_of_a_wide_decode_over_a_small_cache_is_its_matrix_work():
    # 4 x 8 x 64 x 32 x 128 x 32832 FLOP = 275.4 GFLOP; an FP8 cache is only half a gigabyte.
    cost = REGISTRY["tree_decode"].cost(decode_case(nodes=64, dtype="float8_e4m3fn"))
    assert H200.floor_us(cost) == pytest.approx(275_414_777_856 / 790e6)


def test_the_floor_of_a_compaction_is_twice_the_moved_rows():
    # 80 layers x (K and V) x 32 requests x 8 rows x 8 heads x 128 x 2 bytes, read and written: 39.0 us.
    case = Case({"L": 80, "B": 32, "N": 32, "R": 8, "identity": 0}, "bfloat16")
    cost = REGISTRY["compact_window_rows"].cost(case)
    assert H200.floor_us(cost) == pytest.approx(39.02, abs=0.01)
    assert cost.flops == 0


def decode_case(*, nodes: int, dtype: str = "bfloat16") -> Case:
    heads = {"Hq": 32, "Hkv": 8, "D": 128, "page": 64}
    return Case({"B": 8, "P": 32768, "N": nodes, "fp8_query": 0, **heads}, dtype)


def test_buffers_are_many_enough_to_be_cold_and_no_more():
    assert Cost(2**20).num_sets == 128  # a latency measurement: 256 sets would buy nothing
    assert Cost(30 * 2**20).num_sets == 9  # 270 MiB
    assert Cost(2**32).num_sets == 2
    for op in REGISTRY.values():
        for case in op.cases:
            cost = op.cost(case)
            assert cost.num_sets == 128 or cost.num_sets * cost.bytes_moved >= 256 * 2**20


def test_a_graph_holds_about_a_millisecond_of_work():
    assert graph_passes(2, 1000.0) == 1
    assert graph_passes(10, 10.0) == 10
    assert graph_passes(128, 0.01) == 4


def test_a_gpu_without_known_ceilings_is_held_to_its_own():
    measured = Ceilings(1e12, 1e14)
    assert ceilings_of("NVIDIA B300", measured) is measured
    assert ceilings_of("NVIDIA H200", measured).bytes_per_s == 4.3e12


@pytest.mark.parametrize("op", [op for op in REGISTRY if op != "compact_window_rows"])
def test_a_workload_runs_on_distinct_buffers_and_its_torch_baselines_agree(op):
    workload = REGISTRY[op].build(TINY[op], 3, torch.Generator().manual_seed(1))
    assert len(workload.calls) == 3
    results = [call() for call in workload.calls]
    torch_names = [name for name in workload.baselines if name.startswith("torch")]
    for name in torch_names:
        baseline = workload.baselines[name]
        assert baseline.tolerance is not None
        for call, result in zip(baseline.build(), results, strict=True):
            assert ops.relative_difference(call(), result) <= baseline.tolerance
    if torch_names:
        assert ops.relative_difference(results[1], results[0]) > baseline.tolerance


def test_the_compaction_baseline_moves_the_rows_that_the_op_moves():
    build = REGISTRY["compact_window_rows"].build
    ours, theirs = (build(TINY["compact_window_rows"], 2, torch.Generator().manual_seed(1)) for _ in range(2))
    (baseline,) = theirs.baselines.values()
    still = [call() for call in build(STILL, 2, torch.Generator().manual_seed(1)).calls]
    for mine, other, before in zip(ours.calls, baseline.build(), still, strict=True):
        got = mine()
        assert torch.equal(got, other())
        assert not torch.equal(got, before)


def test_a_round_without_models_accepts_long_paths():
    rig = RoundRig(TINY["round_glue"], torch.Generator().manual_seed(1))
    rig.step()  # verifies the dummy tokens of new slots
    assert all(min(rig.step().tolist()) > 1 for _ in range(3))


def test_drafting_alone_leaves_the_next_windows_as_a_round_does():
    rig = RoundRig(TINY["drafting_glue"], torch.Generator().manual_seed(1))
    drafted = {tuple(row) for row in rig.draft().tolist()}
    # The rig's requests hold all slots but the last.
    assert {tuple(row) for row in rig.round.future_input_map[:-1].tolist()} == drafted
    assert not rig.round.future_input_map[-1].any()
    rig.step()
    assert min(rig.step().tolist()) > 1


@pytest.mark.parametrize("nodes", [5, 32, 33, 64, 70])
def test_masks_for_other_libraries_hold_the_same_tree(nodes):
    parents = random_parents(torch.Generator().manual_seed(3), 2, nodes)
    mask = tree_ancestors(parents)[1]
    dense, packed = visible_keys(mask, 3), xqa_mask(mask)
    assert packed.dtype == torch.uint16
    assert packed.shape == (2, nodes, 2 * -(-nodes // 32))
    for b in range(2):
        for i in range(nodes):
            seen = set(trees.path_to(parents[b].tolist(), i))
            assert dense[b, i].tolist() == [True] * 3 + [j in seen for j in range(nodes)]
            words = packed[b, i].tolist()
            assert {j for j in range(16 * len(words)) if words[j // 16] >> (j % 16) & 1} == seen


def test_names_are_checked_together():
    with pytest.raises(ConfigError) as caught:
        entries(["verify_tree", "prefix_attention", "nothing"])
    assert [problem.value for problem in caught.value.problems] == ["prefix_attention", "nothing"]
    assert "has no kernel" in str(caught.value)
    assert [entry.op for entry in entries(["window_slots", "logprob_topk"])] == [
        "logprob_topk",
        "window_slots",
    ]
    assert len(entries([])) == len(REGISTRY)


def fake_op(op: str, tests: str) -> OpBench:
    return OpBench(op, (tests,), (), lambda case: Cost(1), lambda case, sets, generator: Workload([]))


def test_an_op_with_failing_tests_is_refused_and_all_of_them_are_named(tmp_path):
    (tmp_path / "test_red.py").write_text("def test_it():\n    assert False\n")
    (tmp_path / "test_green.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_empty.py").write_text("")
    green, absent = fake_op("a", "test_green.py"), fake_op("b", "test_absent.py")
    assert gate.verdicts([green, absent], root=tmp_path) == {"a": "passed", "b": "untested"}
    red, empty = fake_op("c", "test_red.py"), fake_op("d", "test_empty.py")
    with pytest.raises(ConfigError) as caught:
        gate.verdicts([green, red, empty], root=tmp_path)
    assert [problem.value for problem in caught.value.problems] == ["c", "d"]
    assert "1 failed" in str(caught.value)


def test_a_row_holds_every_baseline_as_a_time_or_a_reason(monkeypatch):
    def no_kernel() -> list[Call]:
        raise RuntimeError("no kernel for this GPU\nsecond line")

    def build(case: Case, sets: int, generator: torch.Generator) -> Workload:
        ours, same = torch.ones(case["M"]), torch.ones(case["M"]) * 1.001
        baselines = {
            "right": Baseline(lambda: [lambda: same], 0.01),
            "wrong": Baseline(lambda: [lambda: same * 2], 0.01),
            "NaN": Baseline(lambda: [lambda: same * math.nan], 0.01),
            "another thing": Baseline(lambda: [lambda: same * 2]),
            "missing": Baseline(no_kernel),
        }
        return Workload([lambda: ours], baselines)

    cases = (Case({"M": 4}), Case({"M": 5}))
    op = OpBench("op", ("test_absent.py",), cases, lambda case: Cost(8_600_000), build)
    for name, value in {
        "_DEVICE": "cpu",
        "require_cuda": lambda: None,
        "measured_ceilings": lambda: Ceilings(4e12, 7e14),
        "median_us": lambda calls, passes, replays: 3.0,
        "num_launches": lambda call: 1,
    }.items():
        monkeypatch.setattr(ops, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    notes: list[str] = []
    (first,) = ops.measure([op], quick=True, commit="abc", on_note=notes.append)
    assert (first.shape, first.tests, first.commit) == ({"M": 4}, "untested", "abc")
    assert (first.median_us, first.floor_us, first.ratio) == (3.0, pytest.approx(2.0), pytest.approx(1.5))
    assert first.baselines == {
        "right": 3.0,
        "wrong": "its result differs by 1",
        "NaN": "its result differs by nan",
        "another thing": 3.0,
        "missing": "RuntimeError: no kernel for this GPU",
    }
    so_far: list[int] = []
    rows = ops.measure([op], skip_tests=True, on_rows=lambda rows: so_far.append(len(rows)))
    assert [row.tests for row in rows] == ["skipped", "skipped"]
    assert so_far == [1, 2], "a run that is cut off keeps what it measured"
    assert notes == ["running the tests of op", "measuring the ceilings", "op M=4 int32"]


@needs_no_cuda
def test_without_cuda_the_command_says_what_is_missing(capsys, tmp_path):
    out = tmp_path / "rows.json"
    assert main(["bench", "ops", "--quick", "--json-out", str(out)]) == 1
    message = capsys.readouterr().err
    assert "device = 'cpu'" in message
    assert "NVIDIA GPU" in message
    assert not out.exists()


def test_an_unknown_op_is_refused_before_anything_runs(capsys):
    assert main(["bench", "ops", "--op", "tree_sort"]) == 1
    assert "--op = 'tree_sort': must be one of tree_window_attention" in capsys.readouterr().err
