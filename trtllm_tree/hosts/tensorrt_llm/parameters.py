"""Does a TensorRT-LLM object take, pass or hold what one symbol says? Judged by its signature, without calling it.

Must not import TensorRT-LLM, nor know how symbols are found.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from trtllm_tree.hosts.tensorrt_llm.symbols import Symbol

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class SymbolMismatch(Exception):
    """A symbol is not there, or not as we use it: its full name, and why."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(path, rule)
        self.path, self.rule = path, rule


def checked_parameters(symbol: Symbol, owner: Any, value: Any, path: str) -> dict[str, str]:
    """Our name of each parameter (the newest one) and its name here.

    Args:
        owner: the class that `value` is an attribute of, if the symbol names a member.
        path: full name of `value`.

    Raises:
        SymbolMismatch: with all that does not fit.
    """
    if symbol.kind == "value":
        return {}
    if symbol.kind == "fields":
        here, faults = _chosen(symbol, set(_field_names(value)), has_any=False)
    else:
        signature = _signature(symbol, owner, value, path)
        given = signature.parameters.values()
        known = {parameter.name for parameter in given if parameter.kind in _NAMED}
        has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given)
        here, faults = _chosen(symbol, known, has_any=has_any)
        if symbol.kind == "override":
            ours = {name for entry in symbol.parameters for name in _names(entry)}
            faults += [f"parameter {name} is new" for name in sorted(known - ours)]
        elif not faults:
            faults += _call_faults(signature, symbol.positional, here.values())
    if faults:
        raise SymbolMismatch(path, "; ".join(faults))
    return here


def missing(names: list[str], known: Iterable[str]) -> str:
    """What to say of something that none of its `names` finds among `known`."""
    near = difflib.get_close_matches(names[0], [name for name in known if name not in names])
    hint = f" (there is {', '.join(near)})" if near else ""
    return f"{' or '.join(names)} is missing{hint}"


def _chosen(symbol: Symbol, known: set[str], *, has_any: bool) -> tuple[dict[str, str], list[str]]:
    """The names to use, and what is missing; `has_any` takes every name."""
    here: dict[str, str] = {}
    faults = []
    for entry in symbol.parameters:
        names = _names(entry)
        name = next((name for name in names if name in known), names[0] if has_any else None)
        if name is not None:
            here[names[0]] = name
        elif not entry.endswith("?"):
            faults.append(f"{'field' if symbol.kind == 'fields' else 'parameter'} {missing(names, known)}")
    return here, faults


def _names(entry: str) -> list[str]:
    return entry.rstrip("?").split("|")


def _call_faults(signature: inspect.Signature, positional: int, names: Iterable[str]) -> list[str]:
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError as error:
        return [f"cannot be called as we do: {error}"]
    return []


def _signature(symbol: Symbol, owner: Any, value: Any, path: str) -> inspect.Signature:
    """As a caller sees it, without self or cls."""
    # Metaclasses of models hide the constructor behind a __call__ that takes anything.
    function = value.__init__ if inspect.isclass(value) else value
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SymbolMismatch(path, f"has no signature to check: {error}") from error
    if not inspect.isclass(value):
        name = path.rpartition(".")[2]
        if not symbol.member or isinstance(inspect.getattr_static(owner, name), (classmethod, staticmethod)):
            return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _field_names(owner: Any) -> Iterator[str]:
    """Attributes that instances of a class have, as far as the class tells."""
    yield from dir(owner)
    # Fields without a default are no attributes of the class.
    for fields in (getattr(owner, "model_fields", None), getattr(owner, "__dataclass_fields__", None)):
        yield from fields or ()
