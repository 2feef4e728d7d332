"""`SpeculativeConfig` as TensorRT-LLM takes it: subclasses of its decoding configs, and how one is made.

Importing this module imports TensorRT-LLM's configuration. A rank does so when it unpickles such an object. Must not
know the worker, nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from trtllm_tree.config.host_rules import trtllm_size_problems
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.config.tree_rules import num_entries
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.symbols import TREE_FEATURES
from trtllm_tree.hosts.tensorrt_llm.translate import plain_config

_LLM_ARGS: Any = importlib.import_module("tensorrt_llm.llmapi.llm_args")
_NO_TREES = "the installed TensorRT-LLM has no dynamic trees for this decoding_type"
# What we write; an older TensorRT-LLM may lack some.
_OLD_HEAD_KEY = "speculative_model_dir"
# Where it is there, it is what counts, and max_draft_len is overwritten.
_OLD_MTP_LENGTH = "num_nextn_predict_layers"
_TREE_KEYS = ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")


class _TreeSizes:
    """Our names of a tree's sizes, read from TensorRT-LLM's fields, so that there is one truth."""

    # Unannotated: pydantic would take an annotation for a field.
    @property
    def tree_topk(self: Any) -> int:
        """K."""
        return self.dynamic_tree_max_topK

    @property
    def num_steps(self: Any) -> int:
        """S."""
        return self.max_draft_len

    @property
    def num_nodes(self: Any) -> int:
        """N, the root included."""
        return 1 + self.max_total_draft_tokens

    @property
    def num_entries(self: Any) -> int:
        """E, candidates scored in a round."""
        return num_entries(self.tree_topk, self.num_steps)

    @property
    def plain(self: Any) -> SpeculativeConfig:
        """The same without TensorRT-LLM: what the embedded host runs."""
        return plain_config(self)


def _base(name: str) -> Any:
    """A decoding config of TensorRT-LLM. Without it nothing is made of its subclass: the probe says what is missing."""
    return getattr(_LLM_ARGS, name, object)


class TreeEagle3Config(_TreeSizes, _base("Eagle3DecodingConfig")):
    """An Eagle3DecodingConfig with a draft tree; its tag stays Eagle3."""


class TreeMTPConfig(_TreeSizes, _base("MTPDecodingConfig")):
    """An MTPDecodingConfig with a draft tree; its tag stays MTP."""


_CLASSES = {
    "Eagle3": (TreeEagle3Config, _base("Eagle3DecodingConfig")),
    "MTP": (TreeMTPConfig, _base("MTPDecodingConfig")),
}
# Of the probe: what goes without these classes.
_FEATURES = {"Eagle3": "chain", "MTP": "mtp"}


def host_config(config: SpeculativeConfig) -> Any:
    """`config` as an object for `tensorrt_llm.LLM(speculative_config=...)`.

    Returns:
        A subclass of TensorRT-LLM's class for a tree, its class itself for a chain.

    Raises:
        ConfigError: a head that is missing, a tree that TensorRT-LLM cannot be told about, values that it refuses.
        UnsupportedError: with all that the installed version lacks for a tree, or for the decoding_type.
    """
    tree_class, plain_class = _CLASSES[config.decoding_type]
    if config.decoding_type == "Eagle3" and config.speculative_model is None:
        rule = "TensorRT-LLM's Eagle3 needs a draft head"
        raise ConfigError(Problem("speculative_model", None, rule, "Name its directory."))
    if config.is_tree and (problems := trtllm_size_problems(config)):
        raise ConfigError(problems)
    if config.is_tree:
        probe().require(TREE_FEATURES[config.decoding_type])
    if plain_class is object:
        probe().require(_FEATURES[config.decoding_type])
    fields = {*getattr(plain_class, "model_fields", ())}
    if fields and config.is_tree and not {*_TREE_KEYS} <= fields:
        raise ConfigError(
            Problem("tree_topk", config.tree_topk, _NO_TREES, "Use tree_topk=1, or a newer TensorRT-LLM.")
        )
    keys = config.to_trtllm()
    del keys["decoding_type"]
    if _OLD_HEAD_KEY in fields and "speculative_model" not in fields and "speculative_model" in keys:
        keys[_OLD_HEAD_KEY] = keys.pop("speculative_model")
    if _OLD_MTP_LENGTH in fields:
        keys[_OLD_MTP_LENGTH] = config.num_steps
    try:
        return (tree_class if config.is_tree else plain_class)(**keys)
    # Of pydantic, which says what it refuses.
    except ValueError as error:
        rule = f"TensorRT-LLM refuses it: {error}"
        raise ConfigError(
            Problem("speculative_config", config.to_trtllm(), rule, "Change that option.")
        ) from error
