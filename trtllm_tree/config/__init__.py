"""Configuration: frozen dataclasses, their rules, and the YAML reader. Loads without torch."""

from __future__ import annotations

from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.guided_decoding import GuidedDecodingParams
from trtllm_tree.config.host_rules import HOSTS, Host, host_problems
from trtllm_tree.config.load import RunConfig, load_config, read_config
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig

__all__ = [
    "HOSTS",
    "EngineConfig",
    "GuidedDecodingParams",
    "Host",
    "RunConfig",
    "SamplingParams",
    "SpeculativeConfig",
    "host_problems",
    "load_config",
    "read_config",
]
