"""Times every op on a GPU against its floor and against what else is installed.

An op's tests pass first (gate.py); then each of its cases (registry.py) runs in a CUDA graph over cold buffers
(timing.py) and becomes one `Row` (report.py). This file is the order of these steps; it must not know any op.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence

import torch

from trtllm_tree.bench.ops import gate
from trtllm_tree.bench.ops.entry import Baseline, Call, Case, Ceilings, OpBench
from trtllm_tree.bench.ops.report import Row
from trtllm_tree.bench.ops.timing import (
    ceilings_of,
    graph_passes,
    measured_ceilings,
    median_us,
    num_launches,
)
from trtllm_tree.errors import ConfigError, Problem

_SEED = 0
_DEVICE = "cuda"


def measure(
    ops: Sequence[OpBench],
    *,
    quick: bool = False,
    skip_tests: bool = False,
    commit: str | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    on_rows: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Measure every case of every op, or an op's first cases with fewer replays when `quick`.

    Args:
        commit: what the rows name as the commit; asked of git if None.
        on_note: gets a line before each longer step.
        on_rows: gets all rows so far after each: a run of minutes may be cut off.

    Raises:
        ConfigError: there is no CUDA device, or tests fail.
    """
    require_cuda()
    tested = {op.op: gate.SKIPPED for op in ops}
    if not skip_tests:
        on_note("running the tests of " + ", ".join(op.op for op in ops))
        tested = gate.verdicts(ops)
    on_note("measuring the ceilings")
    measured = measured_ceilings()
    gpu = torch.cuda.get_device_name()
    run = _Run(
        gpu=gpu,
        ceilings=ceilings_of(gpu, measured),
        measured=measured,
        commit=commit or current_commit(),
        replays=5 if quick else 20,
    )
    rows = []
    for op in ops:
        for case in op.cases[: op.num_quick] if quick else op.cases:
            on_note(f"{op.op} {case}")
            rows.append(run.row(op, case, tested[op.op]))
            on_rows(rows)
            # A case may fill the GPU.
            torch.cuda.empty_cache()
    return rows


def require_cuda() -> None:
    """Refuse a machine without a CUDA device.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        rule = "bench ops times kernels on a CUDA device, and torch finds none"
        remedy = "Run it on a machine with an NVIDIA GPU, its driver and a CUDA build of torch."
        raise ConfigError(Problem("device", "cpu", rule, remedy))


def current_commit() -> str:
    """Short hash of the checkout this package lies in, `-dirty` behind it if files differ; or `unknown`."""
    if not (gate.ROOT / "pyproject.toml").is_file():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=gate.ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def ceilings_of_rows(rows: Sequence[Row]) -> Ceilings:
    """The ceilings behind the floors of one run's rows, which are not empty."""
    first = rows[0]
    measured = Ceilings(first.measured_read_tb_per_s * 1e12, first.measured_matmul_tflop_per_s * 1e12)
    return ceilings_of(first.gpu, measured)


class _Run:
    """What all rows of one run share."""

    def __init__(
        self, *, gpu: str, ceilings: Ceilings, measured: Ceilings, commit: str, replays: int
    ) -> None:
        self._ceilings, self._replays = ceilings, replays
        self._shared = {
            "gpu": gpu,
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "commit": commit,
            "measured_read_tb_per_s": measured.bytes_per_s / 1e12,
            "measured_matmul_tflop_per_s": measured.flops_per_s / 1e12,
        }

    def row(self, op: OpBench, case: Case, tests: str) -> Row:
        """Measure one case."""
        cost = op.cost(case)
        floor_us = self._ceilings.floor_us(cost)
        workload = op.build(case, cost.num_sets, torch.Generator(_DEVICE).manual_seed(_SEED))
        result = workload.calls[0]()
        # What the first call gives; ops that work in place give it only once.
        result = result.clone() if isinstance(result, torch.Tensor) else None
        time_us = self._time(workload.calls, floor_us)
        baselines = {
            name: self._baseline(baseline, result, floor_us) for name, baseline in workload.baselines.items()
        }
        return Row(
            op=op.op,
            shape=dict(case.shape),
            dtype=case.dtype,
            median_us=time_us,
            floor_us=floor_us,
            ratio=time_us / floor_us,
            baselines=baselines,
            launches=num_launches(workload.calls[0]),
            bytes_moved=cost.bytes_moved,
            flops=cost.flops,
            tests=tests,
            **self._shared,
        )

    def _time(self, calls: Sequence[Call], floor_us: float) -> float:
        return median_us(calls, passes=graph_passes(len(calls), floor_us), replays=self._replays)

    def _baseline(self, baseline: Baseline, result: torch.Tensor | None, floor_us: float) -> float | str:
        """Its time, or why there is none."""
        try:
            calls = baseline.build()
            if baseline.tolerance is not None and result is not None:
                error = relative_difference(calls[0](), result)
                if not error <= baseline.tolerance:
                    return f"its result differs by {error:.3g}"
            return self._time(calls, floor_us)
        except Exception as error:
            # A baseline is foreign code: whatever stops it is what the table says of it.
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:160]}"


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, Frobenius norms; results may differ in shape but not in order."""
    got, want = got.float().flatten(), want.float().flatten()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


__all__ = ["Row", "ceilings_of_rows", "current_commit", "measure", "relative_difference", "require_cuda"]
