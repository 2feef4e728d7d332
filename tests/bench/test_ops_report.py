"""The op benchmark's reports from fixed rows: JSON, Markdown, terminal table, roofline plot."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from trtllm_tree.bench.ops import report
from trtllm_tree.bench.ops.entry import Ceilings
from trtllm_tree.bench.ops.plot import roofline_svg

H200 = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)


def row(**changes: object) -> report.Row:
    fields = {
        "op": "tree_decode",
        "shape": {"B": 8, "N": 32},
        "dtype": "bfloat16",
        "median_us": 344.0,
        "floor_us": 250.0,
        "ratio": 1.376,
        "baselines": {"FA2 <mask> | all": 1369.1235, "XQA": "ModuleNotFoundError: no flashinfer"},
        "launches": 2,
        "bytes_moved": 1_073_741_824,
        "flops": 137_438_953_472,
        "tests": "passed",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "commit": "abc1234",
        "measured_read_tb_per_s": 4.41,
        "measured_matmul_tflop_per_s": 776.0,
    }
    return report.Row(**(fields | changes))


ROWS = [
    row(),
    row(
        shape={"B": 1, "N": 32},
        median_us=58.1,
        floor_us=31.2,
        ratio=1.86,
        bytes_moved=134_217_728,
        flops=17 * 10**9,
    ),
    row(
        op="greedy_tokens", flops=0, median_us=20.0, floor_us=15.3, ratio=1.31, baselines={}, tests="untested"
    ),
    row(op="verify_tree", flops=0, median_us=2.0, floor_us=0.001, ratio=2000.0, baselines={}, launches=None),
]


def test_json_brings_every_field_back():
    assert report.from_json(report.to_json(ROWS)) == ROWS
    (rounded,) = json.loads(report.to_json([row(median_us=100 / 3)]))
    assert rounded["median_us"] == 33.3333


def test_markdown_has_one_line_a_row_and_escapes_bars():
    lines = report.to_markdown(ROWS).splitlines()
    assert "NVIDIA H200" in lines[0] and "abc1234" in lines[0] and "4.41 TB/s" in lines[0]
    body = lines[4:]
    assert len(body) == len(ROWS)
    assert "FA2 <mask> \\| all: 1369.12 (3.98x)<br>XQA: ModuleNotFoundError: no flashinfer" in body[0]
    assert "| 250.00 | 344.00 | 1.38 | 2 |" in body[0]
    assert "greedy_tokens (untested)" in body[2]
    assert "| latency | - |" in body[3]


def test_the_terminal_table_has_the_same_rows():
    assert report.to_table(ROWS).row_count == len(ROWS)
    assert report.to_table([]).row_count == 0


def test_the_plot_puts_every_row_where_its_numbers_say():
    svg = ElementTree.fromstring(roofline_svg(ROWS, H200))
    name = "{http://www.w3.org/2000/svg}"
    dots = [dot for dot in svg.iter(f"{name}circle") if dot.find(f"{name}title") is not None]
    assert len(dots) == 2
    (roof,) = svg.iter(f"{name}polyline")
    corners = [tuple(map(float, corner.split(","))) for corner in roof.get("points").split()]
    # The slope enters at 10 TFLOP/s, bends at 790 and runs on to 1000 FLOP a byte: that fixes both scales.
    assert len(corners) == 3

    def pixels(intensity: float, tflops: float) -> tuple[float, float]:
        (x0, y0), (x1, y1), _ = corners
        across = math.log(intensity / (10 / 4.3)) / math.log(790 / 10)
        up = math.log(tflops / 10) / math.log(790 / 10)
        return x0 + across * (x1 - x0), y0 + up * (y1 - y0)

    assert corners[2] == pytest.approx((pixels(1000, 790)), abs=0.2)
    # 128 and 126.66 FLOP a byte at 399.5 and 292.6 TFLOP/s.
    for dot, place in zip(dots, (pixels(128.0, 399.53), pixels(126.66, 292.6)), strict=True):
        assert (float(dot.get("cx")), float(dot.get("cy"))) == pytest.approx(place, abs=0.2)
    bars = [bar for bar in svg.iter(f"{name}rect") if bar.get("height") == "12"]
    assert [float(bar.get("width")) for bar in bars] == [pytest.approx(320 / 1.31, abs=0.1), 0.0]


def test_a_plot_of_one_kind_of_rows_or_none_is_still_a_picture():
    for rows in ([], ROWS[:1], ROWS[2:]):
        ElementTree.fromstring(roofline_svg(rows, H200))
