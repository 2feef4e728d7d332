"""Errors that cross a process say there what they said here."""

from __future__ import annotations

import pickle

import pytest

from trtllm_tree.errors import ConfigError, Problem, ProblemsError, RequestError, UnsupportedError


@pytest.mark.parametrize("kind", [ConfigError, RequestError, UnsupportedError])
def test_an_error_of_several_problems_survives_a_pickle(kind: type[ProblemsError]) -> None:
    error = kind([Problem("a", 1, "is odd", "Make it even."), Problem("b", None, "is missing", "Give it.")])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.problems == error.problems
    assert str(copy) == str(error)
