"""The public `SpeculativeConfig`: ours, or TensorRT-LLM's own kind of object in a process that uses TensorRT-LLM.

Imports TensorRT-LLM only where it has been imported already. Must not know how its objects are made.
"""

from __future__ import annotations

import sys
from typing import Any

from trtllm_tree.config import speculative


class SpeculativeConfig(speculative.SpeculativeConfig):
    """Draft-tree speculation, for every host.

    Takes the arguments of `trtllm_tree.config.SpeculativeConfig`, and checks them alike. Where `tensorrt_llm` has not
    been imported, that is also what comes out. Where it has, it is an object that `tensorrt_llm.LLM` takes as its
    speculative_config: of a subclass of Eagle3DecodingConfig (or MTPDecodingConfig) for a tree, of that class itself
    for a chain. `trtllm_tree.LLM` takes either, on either host.

    Raises:
        ConfigError: with every rule that is broken; in a process with TensorRT-LLM also its own.
    """

    __slots__ = ()

    def __new__(cls, **options: Any) -> Any:
        """Not of this class: Python then does not call `__init__`."""
        config = speculative.SpeculativeConfig(**options)
        # An import that is still going on has no LLM yet.
        if getattr(sys.modules.get("tensorrt_llm"), "LLM", None) is None:
            return config
        from trtllm_tree.hosts.tensorrt_llm.config import host_config

        return host_config(config)
