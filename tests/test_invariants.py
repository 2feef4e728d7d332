"""Each invariant has one owner file, a test that names it, and a line in docs/invariants.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6", "I8", "I9", "I10", "I12", "I13", "I14", "I15")
# "Invariant I1: ..." or "Invariants I3 and I4: ..."
OWNER = re.compile(r"Invariants? (I\d+)(?: and (I\d+))?:")


def docstrings(folder: str, pattern: str) -> dict[str, str]:
    """Module docstrings of the matching files, by path from the project's root."""
    return {
        path.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        or ""
        for path in sorted((ROOT / folder).rglob(pattern))
    }


def owners() -> dict[str, list[str]]:
    """Owner files by invariant id."""
    found: dict[str, list[str]] = {}
    for path, text in docstrings("trtllm_tree", "*.py").items():
        if match := OWNER.match(text):
            for name in filter(None, match.groups()):
                found.setdefault(name, []).append(path)
    return found


def test_every_invariant_has_exactly_one_owner():
    found = owners()
    assert {name: len(paths) for name, paths in found.items()} == dict.fromkeys(INVARIANTS, 1), found


def test_a_file_that_speaks_of_owning_an_invariant_does_so_in_the_known_form():
    claims = re.compile(r"^invariants?\b", re.IGNORECASE)
    odd = [
        path
        for path, text in docstrings("trtllm_tree", "*.py").items()
        if claims.match(text) and not OWNER.match(text)
    ]
    assert odd == []


@pytest.mark.parametrize("name", INVARIANTS)
def test_a_test_file_names_the_invariant(name):
    texts = docstrings("tests", "test_*.py")
    named = [path for path, text in texts.items() if re.search(rf"\b{name}\b", text)]
    assert named, f"no test's module docstring names {name}"


@pytest.mark.parametrize("name", INVARIANTS)
def test_the_invariants_page_links_owner_and_test(name):
    page = ROOT / "docs" / "invariants.md"
    assert page.is_file(), (
        "docs/invariants.md is missing: restate every invariant there, with its owner and its test"
    )
    text = page.read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", text), f"docs/invariants.md does not list {name}"
    (owner,) = owners()[name]
    assert owner in text, f"docs/invariants.md does not link {owner}, the owner of {name}"


def test_the_invariants_page_names_no_file_that_is_not_there():
    page = ROOT / "docs" / "invariants.md"
    assert page.is_file(), "docs/invariants.md is missing"
    paths = set(re.findall(r"(?:trtllm_tree|tests)/[\w/]+\.py", page.read_text(encoding="utf-8")))
    assert paths, "docs/invariants.md links no file"
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
