"""Chooses an attention library for each call of a layer."""

from __future__ import annotations

import os
from typing import Any

from .fmha import FmhaPhase, PhasedFmha
from .forward_args import AttentionInputType
from .layout import NEW
from .registry import get_enabled_fmha_lib_classes


class CombinedFmha(PhasedFmha):
    """One library for the context rows of a call and another for its generation rows."""

    context: Any = None
    generation: Any = None

    def set_fmha_impls(self, context_impl: Any, generation_impl: Any) -> None:
        self.context, self.generation = context_impl, generation_impl

    def run_context(self, params):
        self.context.run_context(params)

    def run_generation(self, params):
        self.generation.run_generation(params)


class FmhaManager:
    """The libraries of one layer. The newest layout remembers its choices by a key that does not see trees."""

    def __init__(self, attn: Any) -> None:
        self.fmha_libs = [
            library(attn) for library in get_enabled_fmha_lib_classes() if library.is_available(attn)
        ]
        self._cache: dict[tuple[Any, ...], Any] = {}
        self._check = os.environ.get("TRTLLM_FMHA_CACHE_SANITY_CHECK", "0") == "1"

    def select(self, attn: Any, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any) -> Any:
        if not NEW:
            return next(one for one in self.fmha_libs if one.is_supported(q, k, v, metadata, forward_args))
        kind = forward_args.attention_input_type
        rows = q.shape[0] - (metadata.num_ctx_tokens if kind == AttentionInputType.mixed else 0)
        has_rows = metadata.num_generations > 0 and kind != AttentionInputType.context_only
        length = rows // metadata.num_generations if has_rows else 0
        key = (metadata.num_contexts, metadata.num_generations, length, metadata.use_spec_decoding)
        if key not in self._cache:
            self._cache[key] = self._choose(attn, q, k, v, metadata, forward_args)
        elif self._check:
            again = self._choose(attn, q, k, v, metadata, forward_args)
            assert _parts(again) == _parts(self._cache[key]), f"the choice for {key} changed"
        return self._cache[key]

    def _choose(self, attn: Any, *call: Any) -> Any:
        metadata = call[3]
        if attn.is_mla_enable:
            return self._choose_latent(call)
        phases = [FmhaPhase.CONTEXT] * (metadata.num_contexts > 0)
        phases += [FmhaPhase.GENERATION] * (metadata.num_generations > 0)
        chosen: dict[FmhaPhase, Any] = {}
        for library in self.fmha_libs:
            if library.is_supported(*call):
                return library
            if isinstance(library, PhasedFmha):
                for phase in phases:
                    if phase not in chosen and library.is_supported(*call, phase=phase):
                        chosen[phase] = library
            if len(chosen) == len(phases):
                break
        assert len(chosen) == len(phases), "no attention library supports this call"
        libraries = list(dict.fromkeys(chosen.values()))
        if len(libraries) == 1:
            return libraries[0]
        combined = CombinedFmha(attn)
        combined.set_fmha_impls(*(chosen[phase] for phase in phases))
        return combined

    def _choose_latent(self, call: tuple[Any, ...]) -> Any:
        """Calls of latent attention are of one phase."""
        only_context = call[4].attention_input_type == AttentionInputType.context_only
        phase = FmhaPhase.CONTEXT if only_context else FmhaPhase.GENERATION
        for library in self.fmha_libs:
            options = {"phase": phase} if isinstance(library, PhasedFmha) else {}
            if library.is_supported(*call, **options):
                return library
        raise RuntimeError("no attention library supports this call")


def _parts(fmha: Any) -> tuple[Any, ...]:
    return (fmha.context, fmha.generation) if isinstance(fmha, CombinedFmha) else (fmha,)
