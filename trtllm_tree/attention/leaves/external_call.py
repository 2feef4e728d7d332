"""Finds a function of an optional package and settles whether our exact call of it can be made.

Nothing is imported before it is asked for, and a call that cannot be made is a `Refused` with the reason, the
installed version and what would help; it never fails at the first token. Must not know any package.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from trtllm_tree.support.report import Refused


def find(package: str, module: str, name: str, remedy: str) -> Callable[..., Any] | Refused:
    """`module.name` of the installed `package`; `remedy` says what to install."""
    try:
        root = importlib.import_module(package)
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name == package:
            return Refused(f"{package} is not installed; {remedy}")
        return Refused(f"{package} cannot be imported ({error}); {remedy}")
    # Libraries that load CUDA when they are imported fail with these where there is none.
    except (ImportError, OSError, RuntimeError) as error:
        return Refused(f"{package} cannot be imported ({error}); {remedy}")
    if found is None:
        return Refused(f"{package} {version(root)} has no {module}.{name}; {remedy}")
    return found


def parameters(function: Callable[..., Any]) -> set[str]:
    """The names that `function` takes."""
    return set(inspect.signature(function).parameters)


def refusal(
    package: str, function: Callable[..., Any], arguments: Collection[str], remedy: str
) -> Refused | None:
    """Why `function(**arguments)` cannot be called, or None.

    Every argument must be a parameter of its own: a stand-in that takes `**kwargs` binds anything and
    raises when it is called.
    """
    signature = inspect.signature(function)
    installed = f"{package} {version(importlib.import_module(package))}"
    name = getattr(function, "__qualname__", repr(function))
    if missing := [argument for argument in arguments if argument not in signature.parameters]:
        return Refused(f"{installed}: {name} does not take {', '.join(missing)}; {remedy}")
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        return Refused(f"{installed}: {name} cannot be called as needed ({error}); {remedy}")
    return None


def version(module: Any) -> str:
    """The version that a package states of itself."""
    return getattr(module, "__version__", "(unknown version)")
