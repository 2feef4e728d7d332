"""Capability answers as data: a part of tree speculation is `Supported`, or `Refused` with a reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Supported:
    """This part works."""


@dataclass(frozen=True)
class Refused:
    """This part does not work here, and why."""

    reason: str


@dataclass(frozen=True)
class TreeSupport:
    """A backend's answer for the target's verify forward and for the drafter's lanes."""

    verify: Supported | Refused
    lanes: Supported | Refused
