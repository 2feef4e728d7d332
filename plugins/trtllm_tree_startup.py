"""Start-up hook: registers trtllm_tree's plugin once TensorRT-LLM has been imported.

trtllm_tree.pth runs this in every Python process of the environment, ranks included, so at start it only puts a finder
on `sys.meta_path`. Owns the moment of registration. Must not import anything at module level that Python has not loaded
itself, must not know what is registered, and must not disturb a process that draws no trees.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

# As `typing` has it, without importing that.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PACKAGE = "tensorrt_llm"
# Newer versions import almost nothing with the package; models can be registered once this is there.
REGISTRY = "tensorrt_llm._torch.models.modeling_utils"


def install() -> None:
    """Watch for TensorRT-LLM, unless TLLM_TREE_DISABLE=1. Does nothing a second time."""
    if not _is_set("TLLM_TREE_DISABLE") and not any(isinstance(one, Watcher) for one in sys.meta_path):
        sys.meta_path.insert(0, Watcher())


class Watcher:
    """A finder that finds nothing itself: it wraps the loader that the others give a module of TensorRT-LLM.

    Only the outermost import of a thread is wrapped. When that has ended, no module of TensorRT-LLM is half imported,
    and the plugin may import what it needs.
    """

    def __init__(self) -> None:
        # Threads in the middle of an import of TensorRT-LLM, or of finding one.
        self._busy: set[int] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE or get_ident() in self._busy:
            return None
        self._busy.add(get_ident())
        try:
            spec = _found_by_others(self, name, path, target)
        finally:
            self._busy.discard(get_ident())
        # Namespace packages have no loader of this kind, and nothing to wait for.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # pyright: ignore[reportAttributeAccessIssue]
        return spec

    def execute(self, loader: Any, module: ModuleType) -> None:
        """Run the module's code; register if TensorRT-LLM is ready for it then."""
        if get_ident() in self._busy:
            loader.exec_module(module)
            return
        self._busy.add(get_ident())
        try:
            loader.exec_module(module)
            if REGISTRY in sys.modules or _is_set("TLLM_TREE_ENABLE"):
                _register()
                self._remove()
        finally:
            self._busy.discard(get_ident())

    def _remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]


class _Loader:
    """Stands in for a module's loader until the module's code runs; the module never sees it."""

    def __init__(self, loader: Any, watcher: Watcher) -> None:
        self._loader, self._watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Resources, sources and reloads go through these two.
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._loader
        self._watcher.execute(self._loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _found_by_others(watcher: Watcher, name: str, path: Any, target: Any) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        if finder is not watcher and find_spec is not None:
            spec = find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _register() -> None:
    """Load and register the plugin. While trees are off, a plugin that is broken costs one line and nothing else."""
    if _is_set("TLLM_TREE_DISABLE"):
        return
    try:
        from trtllm_tree.hosts.tensorrt_llm.plugin import register

        register()
    except Exception as error:
        if _is_set("TLLM_TREE_ENABLE"):
            raise
        print(f"[trtllm_tree] not loaded: {type(error).__name__}: {error}", file=sys.stderr)


def _is_set(name: str) -> bool:
    return os.environ.get(name) == "1"
