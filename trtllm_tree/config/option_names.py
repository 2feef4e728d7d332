"""Unknown keyword arguments of the option classes: errors that name the nearest option, as for keys of a file.

Knows names only; their values are the classes' business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from trtllm_tree.errors import ConfigError, Problem

_Options = TypeVar("_Options", bound=type)


def unknown_option_problems(owner: str, known: Iterable[str], options: Mapping[str, object]) -> list[Problem]:
    """One problem for each of `options` that `owner` has no argument for."""
    lowered = {name.lower(): name for name in known}
    problems = []
    for name, value in options.items():
        if name not in lowered.values():
            near = get_close_matches(name.lower(), lowered, n=1)
            remedy = f"Did you mean {lowered[near[0]]}?" if near else "Remove it."
            problems.append(Problem(name, value, f"is not an option of {owner}", remedy))
    return problems


def refuse_unknown(options_class: _Options) -> _Options:
    """For a keyword-only dataclass: unknown arguments are a ConfigError that names all of them, no TypeError."""
    made: Callable[..., None] = options_class.__init__
    known = [item.name for item in fields(options_class) if item.init]

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if problems := unknown_option_problems(options_class.__name__, known, options):
            raise ConfigError(problems)
        made(self, *args, **options)

    options_class.__init__ = checked
    return options_class
