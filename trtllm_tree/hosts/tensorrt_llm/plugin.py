"""Registration with TensorRT-LLM: our model classes in every process, our attention library where a tree is built.

What is registered is inert unless TLLM_TREE_ENABLE=1 when a model is built: TensorRT-LLM sets the YAML's env_overrides
long after it was imported. Must not import TensorRT-LLM or torch at module level, nor know what a model does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from trtllm_tree.config.host_rules import ATTENTION_LIBRARY, ENABLE_VARIABLE, LIBRARIES_VARIABLE
from trtllm_tree.errors import HostError
from trtllm_tree.hosts.tensorrt_llm.probe import ProbeReport, probe

DISABLE_VARIABLE = "TLLM_TREE_DISABLE"
_MODELS = "trtllm_tree.hosts.tensorrt_llm.models"
_logger = logging.getLogger(__name__)


def trees_enabled() -> bool:
    """Whether models that are built from now on may draft trees."""
    return _is_set(ENABLE_VARIABLE) and not _is_set(DISABLE_VARIABLE)


def register(*, required: bool = False) -> None:
    """Put our model classes in the place of TensorRT-LLM's. Can be repeated; TLLM_TREE_DISABLE=1 makes it do nothing.

    Args:
        required: raise what keeps them from being registered even while trees are off.

    Raises:
        UnsupportedError: trees are on, or registration is required, with all that the installed version lacks.
        HostError: it lacks nothing that is known to be needed, and registration failed.
        HostUnavailableError: it is not installed.
    """
    if _is_set(DISABLE_VARIABLE):
        return
    try:
        importlib.import_module(_MODELS)
    # A version that we do not fit may fail in any way.
    except Exception as error:
        if required or trees_enabled():
            _refuse(error)
        _logger.debug("not registered with TensorRT-LLM", exc_info=True)


def use_attention(report: ProbeReport | None) -> None:
    """Prepare the attention layers that this process builds next: with our library first, or without it.

    Changes TLLM_FMHA_LIBS of this process. A config names our library as "+trtllm_tree", which would put it behind all
    others; the defaults behind it differ between versions, so the full list is written here.

    Args:
        report: the probe's, with the feature `fmha`; None builds a model without a tree, which our library has
            nothing to do with.
    """
    entries = [entry.strip() for entry in os.environ.get(LIBRARIES_VARIABLE, "").split(",") if entry.strip()]
    others = [entry for entry in entries if entry.lstrip("+-").strip() != ATTENTION_LIBRARY]
    if report is None:
        names = others
    else:
        from trtllm_tree.hosts.tensorrt_llm.attention import make_fmha_class

        libraries = report.resolved["fmha", "FMHA_LIBS"].value
        defaults = report.resolved["fmha", "DEFAULT_FMHA_LIBS"].value
        names = [ATTENTION_LIBRARY, *_exact(others, defaults, list(libraries))]
        libraries[ATTENTION_LIBRARY] = make_fmha_class()
    if names:
        os.environ[LIBRARIES_VARIABLE] = ",".join(names)
    else:
        os.environ.pop(LIBRARIES_VARIABLE, None)


def log_line(*, rank: int, worker: type, verify: str, report: ProbeReport) -> str:
    """Print and return the line in which a rank says what it runs. On stderr: ranks hide their log below warnings."""
    resolved = report.resolved.get(("fmha", "get_enabled_fmha_lib_classes"))
    libraries = [library.__name__ for library in resolved.value()] if resolved else []
    missing = sorted({mismatch.path for mismatch in report.mismatches})
    probed = f"TensorRT-LLM {report.version}: {len(report.resolved)} symbols fit"
    line = (
        f"[trtllm_tree] rank {rank}: worker {worker.__name__}, attention {' > '.join(libraries) or 'unknown'}, "
        f"verify {verify}, {probed}" + (f", not needed and missing: {', '.join(missing)}" if missing else "")
    )
    print(line, file=sys.stderr, flush=True)
    return line


def _exact(entries: list[str], defaults: Iterable[str], known: list[str]) -> list[str]:
    """The libraries that `entries` ask for, by name; what TensorRT-LLM would refuse is left for it to refuse."""
    if not all(entry[0] in "+-" for entry in entries):
        return entries
    wanted = dict.fromkeys(name for name in defaults if name != ATTENTION_LIBRARY)
    for entry in entries:
        name = entry[1:].strip()
        if entry[0] == "+":
            wanted[name] = None
        else:
            wanted.pop(name, None)
    # In the registry's order: a library behind the one that takes everything would never be asked.
    return [name for name in known if name in wanted] + [name for name in wanted if name not in known]


def _refuse(error: Exception) -> NoReturn:
    report = probe()
    report.require("trees" if trees_enabled() else "model_registry")
    rule = f"cannot be registered with TensorRT-LLM {report.version}: {type(error).__name__}: {error}"
    raise HostError(f"trtllm_tree {rule}") from error


def _is_set(name: str) -> bool:
    return os.environ.get(name) == "1"
