"""`Row`, one measured case, and its forms: JSON, Markdown, a terminal table. It measures nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

# Below this floor a time is launch latency, and its ratio to the floor says nothing.
LATENCY_FLOOR_US = 0.5
_COLUMNS = ("op", "shape", "dtype", "floor us", "time us", "x floor", "launches", "baselines us (x ours)")


@dataclass(frozen=True)
class Row:
    """One case as it was measured.

    Attributes:
        median_us: microseconds of one call, median of graph replays over cold buffers.
        floor_us: the least that its bytes or its matrix work take on this GPU.
        ratio: median_us / floor_us.
        baselines: by name, microseconds, or the reason why there are none.
        launches: kernels, copies and fills of one eager call.
        bytes_moved: each input byte once, each output byte once.
        flops: matrix arithmetic.
        tests: `passed`, `skipped` or `untested`, of the op's tests in this run.
    """

    op: str
    shape: Mapping[str, int]
    dtype: str
    median_us: float
    floor_us: float
    ratio: float
    baselines: Mapping[str, float | str]
    launches: int | None
    bytes_moved: int
    flops: int
    tests: str
    gpu: str
    torch: str
    triton: str
    commit: str
    measured_read_tb_per_s: float
    measured_matmul_tflop_per_s: float

    @property
    def shape_text(self) -> str:
        """The shape as `B=8 N=32`."""
        return " ".join(f"{name}={size}" for name, size in self.shape.items())

    def cells(self) -> list[str]:
        """One text a column."""
        return [
            self.op if self.tests == "passed" else f"{self.op} ({self.tests})",
            self.shape_text,
            self.dtype,
            f"{self.floor_us:.2f}",
            f"{self.median_us:.2f}",
            f"{self.ratio:.2f}" if self.floor_us >= LATENCY_FLOOR_US else "latency",
            "-" if self.launches is None else str(self.launches),
        ]

    def baseline_cells(self) -> list[str]:
        """One text a baseline."""
        return [
            f"{name}: {value}"
            if isinstance(value, str)
            else f"{name}: {value:.2f} ({value / self.median_us:.2f}x)"
            for name, value in self.baselines.items()
        ]


def to_json(rows: Sequence[Row]) -> str:
    """A list of objects, one row a line, numbers with four decimals."""
    return "[\n" + ",\n".join(json.dumps(_rounded(dataclasses.asdict(row))) for row in rows) + "\n]\n"


def from_json(text: str) -> list[Row]:
    """The rows of `to_json`."""
    return [Row(**fields) for fields in json.loads(text)]


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def conditions(row: Row) -> str:
    """What every row of a run has in common, as one sentence."""
    return (
        f"{row.gpu}, torch {row.torch}, triton {row.triton}, commit {row.commit}; this run reached "
        f"{row.measured_read_tb_per_s:.2f} TB/s reading 4 GiB and {row.measured_matmul_tflop_per_s:.0f} "
        "TFLOP/s in a bfloat16 product of 8192 cubed."
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """The conditions and one table."""
    if not rows:
        return "Nothing was measured.\n"
    lines = [conditions(rows[0]), "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line([*row.cells(), "<br>".join(row.baseline_cells())]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_table(rows: Sequence[Row]) -> Table:
    """A table for a terminal."""
    table = Table(title=conditions(rows[0]) if rows else "Nothing was measured.", show_lines=True)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.cells(), "\n".join(row.baseline_cells()))
    return table
