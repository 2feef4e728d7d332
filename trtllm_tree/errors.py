"""The exceptions of this package; every error a user can cause is one of these.

    TreeError
    ├── ConfigError          a config, option or model directory that cannot be used; lists every problem
    ├── UnsupportedError     a valid wish that this combination of backends cannot honour; lists every blocker
    ├── HostError            the runtime under us misbehaves or lacks a symbol
    │   └── HostUnavailableError   the runtime that was asked for is not installed
    └── RequestError         one request cannot be served; other requests go on

A message names the option, the value, the rule and the remedy. Problems are collected first and raised
together, so that a user mends a config in one go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: which option, its value, the rule it breaks, and what to do."""

    option: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.option} = {self.value!r}: {self.rule}. {self.remedy}"


class TreeError(Exception):
    """Base of every error of this package."""


class ProblemsError(TreeError):
    """An error made of one or more `Problem`s, all of them in the message."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[tuple[Problem, ...]]]:
        # Exceptions are rebuilt from their message; a rank's error reaches its parent process as a pickle.
        return type(self), (self.problems,)


class ConfigError(ProblemsError):
    """A config, option or model directory cannot be used."""


class UnsupportedError(ProblemsError):
    """The combination asked for is valid but not supported here."""


class HostError(TreeError):
    """The runtime under us does not behave as its contract says."""


class HostUnavailableError(HostError):
    """The runtime that was asked for is not installed."""


class RequestError(ProblemsError):
    """One request cannot be served. It ends alone."""
