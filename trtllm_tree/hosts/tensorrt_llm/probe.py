"""Which features the installed TensorRT-LLM offers: every symbol looked up once, every mismatch reported together.

Features are detected, versions are never compared. Looking up imports TensorRT-LLM, this module does not. Must not
know what a symbol is for, nor register anything.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trtllm_tree.errors import HostUnavailableError, Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.parameters import SymbolMismatch, checked_parameters, missing
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES, SYMBOLS, WORKER_OWNER, Symbol
from trtllm_tree.support.report import Refused, Supported

PACKAGE = "tensorrt_llm"
NOT_INSTALLED = "TensorRT-LLM is not installed here; nothing of it was probed"
CHAIN_REMEDY = "Use a TensorRT-LLM of the 1.4 line."
TREE_REMEDY = (
    "Use a TensorRT-LLM with dynamic trees (1.4, or a late 1.3 release candidate), or tree_topk=1 (a chain)."
)
_FEATURES = {feature.id: feature for feature in FEATURES}
# What goes without a tree; a mismatch elsewhere may be avoided by a chain.
_NO_TREE = ("chain", "llm_api", "serve", "drafter")


@dataclass(frozen=True)
class Resolved:
    """A symbol that is there and fits.

    Attributes:
        value: the object; of a `member`, the class's attribute.
        path: its full name here.
        parameters: our name of each parameter (the newest one) and the one to use here.
    """

    symbol: Symbol
    value: Any
    path: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as we use it: its full name, what is wrong, and the features that go without it."""

    path: str
    rule: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class ProbeReport:
    """What was found.

    Attributes:
        version: of the installed TensorRT-LLM, for messages only; None where there is none.
        resolved: what fits, by (feature, symbol id).
        mismatches: what does not, each once.
    """

    version: str | None
    resolved: Mapping[tuple[str, str], Resolved] = field(default_factory=dict)
    mismatches: tuple[Mismatch, ...] = ()

    def answer(self, feature: str) -> Supported | Refused:
        """Whether `feature` works with what is installed; the reason names all that it lacks."""
        if self.version is None:
            return Refused(NOT_INSTALLED)
        found = [f"{mismatch.path}: {mismatch.rule}" for mismatch in self._of((feature,))]
        return Refused("; ".join(found)) if found else Supported()

    def problems(self, *features: str) -> list[Problem]:
        """All that these features lack (any feature, if none is named), each once."""
        if self.version is None:
            return [Problem(PACKAGE, None, NOT_INSTALLED, "Install it, or use the embedded host.")]
        return [
            Problem(found.path, self.version, f"{found.rule}; needed for {_purposes(found)}", _remedy(found))
            for found in self._of(features)
        ]

    def require(self, *features: str) -> None:
        """Check these features (all, if none is named) before anything is registered.

        Raises:
            HostUnavailableError: TensorRT-LLM is not installed.
            UnsupportedError: with everything that they lack.
        """
        if self.version is None:
            raise HostUnavailableError(NOT_INSTALLED)
        if problems := self.problems(*features):
            raise UnsupportedError(problems)

    def _of(self, features: Iterable[str]) -> list[Mismatch]:
        wanted = set(_closure(features or _FEATURES))
        return [found for found in self.mismatches if wanted.intersection(found.features)]


def probe() -> ProbeReport:
    """Look up every symbol in the installed TensorRT-LLM. Imports it, and with it torch."""
    version = _installed_version()
    if version is None:
        return ProbeReport(None)
    lookup = _Lookup()
    try:
        lookup.module(PACKAGE)
    except SymbolMismatch as broken:
        return ProbeReport(version, {}, (Mismatch(broken.path, broken.rule, tuple(_FEATURES)),))
    resolved: dict[tuple[str, str], Resolved] = {}
    # What several symbols miss is one mismatch, of all their features.
    missed: dict[tuple[str, str], list[str]] = {}
    for symbol in SYMBOLS:
        try:
            resolved[symbol.feature, symbol.id] = lookup.resolve(symbol)
        except SymbolMismatch as found:
            features = missed.setdefault((found.path, found.rule), [])
            features += [symbol.feature] if symbol.feature not in features else []
    mismatches = tuple(Mismatch(*where, tuple(features)) for where, features in missed.items())
    return ProbeReport(version, resolved, mismatches)


class _Lookup:
    """Finds symbols; imports each module once. All its methods raise `SymbolMismatch`."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType | SymbolMismatch | None] = {}

    def resolve(self, symbol: Symbol) -> Resolved:
        """`symbol` as it is here, checked."""
        owner, path = self._owner(symbol)
        value = owner
        if symbol.member:
            name = _member(symbol, owner, path)
            value, path = getattr(owner, name), f"{path}.{name}"
        parameters = checked_parameters(symbol, owner, value, path)
        if symbol.kind == "model":
            self._check_worker_owner(value, path)
        return Resolved(symbol, value, path, parameters)

    def module(self, name: str) -> ModuleType | None:
        """The module; None where it does not exist."""
        if name not in self._modules:
            self._modules[name] = _imported(name)
        found = self._modules[name]
        if isinstance(found, SymbolMismatch):
            raise found
        return found

    def _owner(self, symbol: Symbol) -> tuple[Any, str]:
        """The object `symbol.name` of the first candidate module that has it, and its full name."""
        there: list[ModuleType] = []
        for name in symbol.modules:
            if (module := self.module(name)) is None:
                continue
            if (owner := _attribute(module, symbol.name)) is not None:
                return owner, f"{name}.{symbol.name}"
            there.append(module)
        if not there:
            newest, *older = symbol.modules
            raise SymbolMismatch(newest, "is not there" + (", nor under its older path" if older else ""))
        known = [name for module in there for name in dir(module)]
        raise SymbolMismatch(f"{there[0].__name__}.{symbol.name}", missing([symbol.name], known))

    def _check_worker_owner(self, model: Any, path: str) -> None:
        """Only models of this base own a worker. Where the base is missing, that is reported already."""
        symbol = next(symbol for symbol in SYMBOLS if symbol.name == WORKER_OWNER)
        try:
            base, _ = self._owner(symbol)
        except SymbolMismatch:
            return
        if not (inspect.isclass(model) and issubclass(model, base)):
            raise SymbolMismatch(path, f"is no {WORKER_OWNER}, so it owns no worker that ours could replace")


def _installed_version() -> str | None:
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _imported(name: str) -> ModuleType | SymbolMismatch | None:
    """The module, None where it does not exist, or why it cannot be imported."""
    try:
        return importlib.import_module(name)
    # Libraries that do not load raise what they like; it becomes a line of the report.
    except Exception as error:
        # A package above it may be what is missing; a dependency of it is another matter.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        return SymbolMismatch(name, f"cannot be imported: {type(error).__name__}: {error}")


def _attribute(module: ModuleType, name: str) -> Any:
    """An attribute of a module, which may be imported on first use; None where there is none."""
    try:
        return getattr(module, name, None)
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise SymbolMismatch(f"{module.__name__}.{name}", rule) from error


def _member(symbol: Symbol, owner: Any, path: str) -> str:
    """The newest of the names of `symbol.member` that the class has, and lets us override if we do."""
    names = symbol.member.split("|")
    there = [name for name in names if hasattr(owner, name)]
    if not there:
        raise SymbolMismatch(f"{path}.{names[0]}", missing(names, dir(owner)))
    if symbol.kind == "override":
        there = [name for name in there if not getattr(getattr(owner, name), "__final__", False)]
    if not there:
        raise SymbolMismatch(f"{path}.{names[0]}", f"{' or '.join(names)} cannot be overridden")
    return there[0]


def _closure(features: Iterable[str]) -> Iterator[str]:
    for feature in features:
        yield feature
        yield from _closure(_FEATURES[feature].needs)


def _purposes(mismatch: Mismatch) -> str:
    return ", ".join(_FEATURES[feature].what for feature in mismatch.features)


def _remedy(mismatch: Mismatch) -> str:
    return CHAIN_REMEDY if set(_NO_TREE).intersection(mismatch.features) else TREE_REMEDY
