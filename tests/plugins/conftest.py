"""The wheel, built; a fresh environment with it; and Python processes in that."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# What a variable of the test's own process must not decide.
OURS = ("TLLM_TREE_ENABLE", "TLLM_TREE_DISABLE", "TLLM_FMHA_LIBS", "PYTHONPATH")


def build(kind: str, target: Path) -> Path:
    """A wheel of the project: `build_wheel`, or `build_editable`, as pip would call it."""
    code = f"import hatchling.build as b, sys; print(b.{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=PROJECT, check=True, capture_output=True, text=True
    )
    return target / done.stdout.split()[-1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds the wheel and, behind it, the packages of the one that runs the tests."""

    python: Path
    site_packages: Path

    def run(
        self, code: str, *path: Path, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run code with `path` in front of all packages; unlike the code of -c, processes it spawns can import it."""
        script = self.python.parent / f"script_{abs(hash(code))}.py"
        script.write_text(textwrap.dedent(code), encoding="utf-8")
        return self.call([str(script)], *path, check=check, **variables)

    def call(
        self, arguments: list[str], *path: Path, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in OURS}
        environment |= variables | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [str(self.python), *arguments]
        # With -m and -c the current folder comes first on the path, and must not be the project.
        done = subprocess.run(
            command,
            env=environment,
            cwd=self.site_packages.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    root = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    python = root / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    (site_packages,) = root.glob("lib/python*/site-packages")
    # Python does not read .pth files of directories that a .pth file names: an installed hook there stays asleep.
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return Environment(python, site_packages)
