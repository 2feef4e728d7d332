"""An op is timed only after its tests have passed on this machine.

Owns the pytest subprocess. Where the tests are not there, as beside an installed wheel, the verdict says so.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import trtllm_tree
from trtllm_tree.bench.ops.entry import OpBench
from trtllm_tree.errors import ConfigError, Problem

PASSED, UNTESTED, SKIPPED = "passed", "untested", "skipped"
ROOT = Path(trtllm_tree.__file__).resolve().parents[1]


def verdicts(ops: Sequence[OpBench], *, root: Path = ROOT) -> dict[str, str]:
    """`passed` or `untested` for each op; ops that share their tests run them once.

    Raises:
        ConfigError: naming every op whose tests fail.
    """
    outcomes: dict[tuple[str, ...], str | None] = {}
    for op in ops:
        if op.tests not in outcomes:
            outcomes[op.tests] = _failure(op.tests, root)
    red = [(op.op, failure) for op in ops if (failure := outcomes[op.tests]) not in (None, UNTESTED)]
    if red:
        remedy = "A wrong kernel is not timed: mend it first (--skip-tests times it all the same)."
        raise ConfigError([Problem("--op", op, f"its tests fail ({failure})", remedy) for op, failure in red])
    return {op.op: outcomes[op.tests] or PASSED for op in ops}


def _failure(tests: tuple[str, ...], root: Path) -> str | None:
    """None if the tests pass, `untested` if there are none, else pytest's last line."""
    if not (root / tests[0]).is_file() or importlib.util.find_spec("pytest") is None:
        return UNTESTED
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *tests]
    if importlib.util.find_spec("xdist") is not None:
        # Most of the time goes into compiling kernels, on one processor a process.
        command += ["-n", str(max(1, (os.cpu_count() or 1) - 1))]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
