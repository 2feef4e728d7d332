"""Which attention libraries there are, and which of them the environment enables."""

from __future__ import annotations

import os
from typing import Any

from .fallback import FallbackFmha

FMHA_LIBS: dict[str, Any] = {"fallback": FallbackFmha}
DEFAULT_FMHA_LIBS: tuple[str, ...] = tuple(FMHA_LIBS)


def get_enabled_fmha_lib_classes():
    return [FMHA_LIBS[name] for name in _enabled(os.environ.get("TLLM_FMHA_LIBS", ""))]


def _enabled(value: str) -> list[str]:
    """Names in order: those of an exact list, or the defaults and what +name and -name change."""
    tokens = [token.strip() for token in value.split(",") if token.strip()]
    if not tokens:
        return list(DEFAULT_FMHA_LIBS)
    signed = [token[0] in "+-" for token in tokens]
    if any(signed) and not all(signed):
        raise ValueError("TLLM_FMHA_LIBS is either a list of names, or all of its entries have a sign")
    names = [token[1:].strip() if sign else token for token, sign in zip(tokens, signed, strict=True)]
    for name in names:
        if name not in FMHA_LIBS:
            raise ValueError(f"TLLM_FMHA_LIBS names {name!r}, which is no FMHA library")
    if not any(signed):
        return list(dict.fromkeys(names))
    enabled = set(DEFAULT_FMHA_LIBS)
    for token, name in zip(tokens, names, strict=True):
        enabled.add(name) if token[0] == "+" else enabled.discard(name)
    return [name for name in FMHA_LIBS if name in enabled]
