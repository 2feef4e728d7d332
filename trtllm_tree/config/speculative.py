"""How a model speculates: the sizes of the draft tree, the drafter, and their TensorRT-LLM spelling.

Owns the validation of (K, S, N) through tree_rules.py and the translation from and to the keys of TensorRT-LLM's
`Eagle3DecodingConfig` and `MTPDecodingConfig`. Knows no model and no host: host_rules.py says what hosts refuse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from trtllm_tree.config.keys import (
    DECODING_TYPES,
    DRAFTERS,
    SPECULATIVE_FIELDS,
    SPECULATIVE_OPTIONS,
    unknown_key_problems,
)
from trtllm_tree.config.option_names import refuse_unknown
from trtllm_tree.config.tree_rules import (
    DEFAULT_STEPS,
    DEFAULT_TOPK,
    PYTHON_SPELLING,
    TRTLLM_SPELLING,
    default_num_nodes,
    is_int,
    num_entries,
    tree_problems,
)
from trtllm_tree.errors import ConfigError, Problem

# TensorRT-LLM's slot storage and our plugin there hold one 64-bit word of ancestors per node.
TRTLLM_MAX_NODES = 64


@refuse_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Draft-tree speculation; a tree_topk of 1 drafts a chain.

    Args:
        tree_topk: K, lanes per draft step, 1 to 16.
        num_steps: S, draft forwards per round, 1 to 10.
        num_nodes: N, nodes of the verify window with the root included, 2 to 256. None, the default, chooses
            a legal count; after construction it is an int.
        speculative_model: directory of the draft head, or "demo"; MTP layers are in the target's checkpoint.
        decoding_type: TensorRT-LLM's name of the drafter: "Eagle3" (a head) or "MTP" (the target's own layer, run
            S times).
        use_rejection_sampling: above temperature 0, accept drafts by rejection, which keeps the target's law but not
            the tokens that plain decoding with the same seed gives. False, the default, keeps these too.
        host_options: further keys of TensorRT-LLM's Eagle3DecodingConfig or MTPDecodingConfig, kept for that host.

    Raises:
        ConfigError: with every rule that is broken.
    """

    tree_topk: int = DEFAULT_TOPK
    num_steps: int = DEFAULT_STEPS
    # Typed as what it is after construction, so that readers need no None check.
    num_nodes: int = cast("int", None)
    speculative_model: str | None = None
    decoding_type: str = "Eagle3"
    use_rejection_sampling: bool = False
    host_options: dict[str, object] = field(default_factory=dict, hash=False)
    is_default_nodes: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.speculative_model, os.PathLike):
            object.__setattr__(self, "speculative_model", os.fspath(self.speculative_model))
        problems = tree_problems(self.tree_topk, self.num_steps, self.num_nodes, PYTHON_SPELLING)
        problems += _decoding_type_problems("decoding_type", self.decoding_type)
        problems += _head_problems("speculative_model", self.speculative_model)
        problems += _flag_problems("use_rejection_sampling", self.use_rejection_sampling)
        problems += unknown_key_problems("speculative_config", self.host_options, self.decoding_type)
        problems += _field_problems(self.host_options)
        if problems:
            raise ConfigError(problems)
        is_default = cast("int | None", self.num_nodes) is None
        object.__setattr__(self, "is_default_nodes", is_default)
        if is_default:
            object.__setattr__(self, "num_nodes", default_num_nodes(self.tree_topk, self.num_steps))

    @property
    def is_tree(self) -> bool:
        """Whether there is a tree at all (K > 1); with K = 1 the chain path runs unchanged."""
        return self.tree_topk > 1

    @property
    def num_entries(self) -> int:
        """E = K + (S - 1) * K^2, candidates scored in a round."""
        return num_entries(self.tree_topk, self.num_steps)

    @property
    def lane_window(self) -> int:
        """Draft-cache slots that the lanes of a round write: (S - 1) * K."""
        return (self.num_steps - 1) * self.tree_topk

    @property
    def max_path_len(self) -> int:
        """Longest accepted path, root included: min(S + 1, N)."""
        return min(self.num_steps + 1, self.num_nodes)

    @property
    def mask_words(self) -> int:
        """64-bit words of a node's ancestor mask: ceil(N / 64)."""
        return -(-self.num_nodes // 64)

    def as_chain(self) -> SpeculativeConfig:
        """The same drafter and steps without a tree."""
        return SpeculativeConfig(
            tree_topk=1,
            num_steps=self.num_steps,
            speculative_model=self.speculative_model,
            decoding_type=self.decoding_type,
        )

    def to_trtllm(self) -> dict[str, object]:
        """The keys of TensorRT-LLM's decoding config that ask for the same.

        TensorRT-LLM allows smaller trees than we do. An N that nobody asked for is lowered to its limits; an
        N that was asked for is written as it is (`host_problems` tells whether that host takes it).
        """
        keys: dict[str, object] = {"decoding_type": self.decoding_type, "max_draft_len": self.num_steps}
        if self.speculative_model is not None:
            keys["speculative_model"] = self.speculative_model
        if self.is_tree:
            limit = min(self.tree_topk * self.num_steps, TRTLLM_MAX_NODES - 1)
            total = self.num_nodes - 1
            keys["use_dynamic_tree"] = True
            keys["dynamic_tree_max_topK"] = self.tree_topk
            keys["max_total_draft_tokens"] = min(total, limit) if self.is_default_nodes else total
        if self.use_rejection_sampling:
            keys["use_rejection_sampling"] = True
        return keys | self.host_options

    @classmethod
    def from_trtllm(cls, mapping: Mapping[str, object]) -> SpeculativeConfig:
        """Read a `speculative_config` section as TensorRT-LLM does, with its defaults and requirements.

        `max_total_draft_tokens` defaults to K * S there.

        Raises:
            ConfigError: with every wrong key and value, spelled as in the file.
        """
        kind = mapping.get("decoding_type")
        problems = _decoding_type_problems("speculative_config.decoding_type", kind)
        # The legal keys depend on the decoding type, so another type's keys are not judged.
        if problems and kind in DECODING_TYPES:
            raise ConfigError(problems)
        problems += unknown_key_problems("speculative_config", mapping, kind)
        head = _read_head(mapping, problems)
        topk = _read_topk(mapping, problems)
        rejection = mapping.get("use_rejection_sampling", False)
        problems += _flag_problems("speculative_config.use_rejection_sampling", rejection)
        steps = mapping.get("max_draft_len")
        if steps is None:
            rule, remedy = "TensorRT-LLM requires it", f"Set max_draft_len to {DEFAULT_STEPS}."
            problems.append(Problem("speculative_config.max_draft_len", None, rule, remedy))
            steps = DEFAULT_STEPS
        total = mapping.get("max_total_draft_tokens")
        problems += tree_problems(topk, steps, total, TRTLLM_SPELLING)
        if problems:
            raise ConfigError(problems)
        assert is_int(topk) and is_int(steps) and (total is None or is_int(total)), (
            "tree_problems checks types"
        )
        nodes = 1 + (topk * steps if total is None else total)
        options = {key: mapping[key] for key in SPECULATIVE_OPTIONS if key in mapping}
        return cls(
            tree_topk=topk,
            num_steps=steps,
            num_nodes=nodes,
            speculative_model=head,
            decoding_type=cast("str", kind),
            use_rejection_sampling=cast("bool", rejection),
            host_options=options,
        )


def _decoding_type_problems(option: str, value: object) -> list[Problem]:
    if value in DRAFTERS:
        return []
    known = f" ({value} is one of TensorRT-LLM's, not drafted here)" if value in DECODING_TYPES else ""
    rule = f"the known values are {' and '.join(DRAFTERS)}{known}"
    meant = "MTP" if isinstance(value, str) and value.upper() == "MTP" else "Eagle3"
    return [Problem(option, value, rule, f"Set decoding_type to {meant}.")]


def _field_problems(host_options: Mapping[str, object]) -> list[Problem]:
    """A key that has a field must not come in by the back door, where it would escape the rules."""
    return [
        Problem("host_options", key, "has a field of its own", "Use the field instead.")
        for key in SPECULATIVE_FIELDS
        if key in host_options
    ]


def _head_problems(option: str, value: object) -> list[Problem]:
    if value is None or (isinstance(value, str) and value):
        return []
    return [Problem(option, value, "must be the path of a draft head", 'Name its directory, or "demo".')]


def _flag_problems(option: str, value: object) -> list[Problem]:
    if isinstance(value, bool):
        return []
    return [Problem(option, value, "must be true or false", f"Set {option.rpartition('.')[2]} to false.")]


def _read_head(mapping: Mapping[str, object], problems: list[Problem]) -> str | None:
    head, alias = mapping.get("speculative_model"), mapping.get("speculative_model_dir")
    if head is not None and alias is not None:
        rule = "is another name of speculative_model, which is set too"
        problems.append(
            Problem("speculative_config.speculative_model_dir", alias, rule, "Remove one of them.")
        )
    chosen = alias if head is None else head
    problems += _head_problems("speculative_config.speculative_model", chosen)
    return cast("str | None", chosen)


def _read_topk(mapping: Mapping[str, object], problems: list[Problem]) -> object:
    """K, where both keys say the same: a top-K alone is a tree to older versions and a chain to newer ones."""
    tree, topk = mapping.get("use_dynamic_tree"), mapping.get("dynamic_tree_max_topK")
    option = "speculative_config.use_dynamic_tree"
    if tree is not None and not isinstance(tree, bool):
        problems.append(Problem(option, tree, "must be true or false", "Set use_dynamic_tree to true."))
    elif tree and topk is None:
        rule, remedy = "needs dynamic_tree_max_topK", f"Set dynamic_tree_max_topK to {DEFAULT_TOPK}."
        problems.append(Problem(option, tree, rule, remedy))
    elif tree is False and topk not in (None, 1):
        rule = f"contradicts dynamic_tree_max_topK = {topk!r}, with which older TensorRT-LLM drafts a tree"
        remedy = "Set use_dynamic_tree to true, or remove dynamic_tree_max_topK for a chain."
        problems.append(Problem(option, tree, rule, remedy))
    elif tree is None and is_int(topk) and topk > 1:
        rule = f"is needed beside dynamic_tree_max_topK = {topk}, which newer TensorRT-LLM ignores without it"
        remedy = "Set use_dynamic_tree to true, or remove dynamic_tree_max_topK for a chain."
        problems.append(Problem(option, tree, rule, remedy))
    if topk is None:
        return DEFAULT_TOPK if tree else 1
    return topk
