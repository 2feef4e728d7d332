"""Which models' own MTP layers draft, by the facts of config.json. Must not know torch, nor who runs the layer."""

from __future__ import annotations

from trtllm_tree.config.host_rules import Host
from trtllm_tree.config.model_rules import MTP_MODELS, MULTI_DEPTH_RULE, NO_MTP_RULE, mtp_rule
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts

_DRAFTER, _COUNT = ("speculative_config.decoding_type", "MTP"), "model: num_nextn_predict_layers"
_REMEDY = "Set decoding_type to Eagle3 and name a head, or use another model."
_COUNT_REMEDY = (
    "Set num_nextn_predict_layers to 1 if the checkpoint has the layer, or decoding_type to Eagle3."
)


def mtp_problems(target: ModelFacts, host: Host) -> list[Problem]:
    """Every reason that the target's MTP layer cannot be run again and again as its drafter (EAGLE-style).

    A chain on TensorRT-LLM is its own business, and not judged by this.
    """
    count = target.num_mtp_layers
    if not count:
        remedy = _COUNT_REMEDY if target.model_type in MTP_MODELS[host] else _REMEDY
        return [Problem(*_DRAFTER, NO_MTP_RULE, remedy)]
    problems = []
    if count > 1:
        problems.append(Problem(_COUNT, count, MULTI_DEPTH_RULE, _REMEDY))
    if target.model_type not in MTP_MODELS[host]:
        problems.append(Problem(*_DRAFTER, mtp_rule(host, target.model_type), _REMEDY))
    return problems
