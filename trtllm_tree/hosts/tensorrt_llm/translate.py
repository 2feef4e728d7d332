"""From TensorRT-LLM's decoding configs back to ours: K, S, N of any object that it hands to a model.

Reads attributes only, so it imports neither TensorRT-LLM nor torch. Must not judge what it reads: that is refusals.py.
"""

from __future__ import annotations

from typing import Any

from trtllm_tree.config.keys import DRAFTERS, SPECULATIVE_OPTIONS, known_keys
from trtllm_tree.config.speculative import SpeculativeConfig

# TensorRT-LLM's validators set these themselves.
_DERIVED = ("num_eagle_layers", "max_batch_size")


def is_effective_tree(spec_config: Any) -> bool:
    """Whether this decoding config drafts a tree; by TensorRT-LLM's own reading one of a single lane is a chain."""
    return bool(getattr(spec_config, "use_dynamic_tree", False)) and (
        (getattr(spec_config, "dynamic_tree_max_topK", None) or 0) > 1
    )


def plain_config(spec_config: Any) -> SpeculativeConfig:
    """What `spec_config`, an Eagle3DecodingConfig or MTPDecodingConfig, asks for; ours is returned as it is.

    Raises:
        ConfigError: sizes or a drafter that we do not know, with every problem in TensorRT-LLM's spelling.
    """
    if isinstance(spec_config, SpeculativeConfig):
        return spec_config
    kind = spec_config.decoding_type
    head = getattr(spec_config, "speculative_model", None) or getattr(
        spec_config, "speculative_model_dir", None
    )
    keys: dict[str, object] = {"decoding_type": kind, "max_draft_len": spec_config.max_draft_len}
    if head is not None:
        keys["speculative_model"] = str(head)
    if is_effective_tree(spec_config):
        keys["use_dynamic_tree"] = True
        keys["dynamic_tree_max_topK"] = spec_config.dynamic_tree_max_topK
        keys["max_total_draft_tokens"] = spec_config.max_total_draft_tokens
    if getattr(spec_config, "use_rejection_sampling", False):
        keys["use_rejection_sampling"] = True
    return SpeculativeConfig.from_trtllm(keys | other_options(spec_config))


def other_options(spec_config: Any) -> dict[str, object]:
    """The keys besides drafter, sizes and head that ask for something."""
    kind = spec_config.decoding_type
    if kind not in DRAFTERS:
        return {}
    known = [key for key in known_keys("speculative_config", kind) if key in SPECULATIVE_OPTIONS]
    derived = [*_DERIVED]
    # A limit on requests is kept twice there: as it was written, and as the schedule that it means.
    if getattr(spec_config, "max_concurrency", None) is not None:
        derived.append("draft_len_schedule")
    values = {key: getattr(spec_config, key, SPECULATIVE_OPTIONS[key]) for key in known if key not in derived}
    return {key: value for key, value in values.items() if value != SPECULATIVE_OPTIONS[key]}
