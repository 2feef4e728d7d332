"""The rules of (K, S, N), and their TensorRT-LLM spelling."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tree.config import RunConfig, SpeculativeConfig, host_problems
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.host_rules import HOSTS
from trtllm_tree.errors import ConfigError

TOPK, STEPS, NODES = st.integers(-2, 20), st.integers(-2, 14), st.integers(-3, 300)


def is_legal(k: int, s: int, n: int) -> bool:
    """The rules, counted out on the rows of a tree instead of computed from the closed forms."""
    if k not in range(1, 17) or s not in range(1, 11) or n not in range(2, 257):
        return False
    lane_slots = [row for step in range(1, s) for row in range(k)]
    if k == 1:
        return n == 1 + len(range(s))
    # Step 0 scores the root's K children; every later step scores K children for each of its K lanes.
    candidates = [(0, child) for child in range(k)]
    candidates += [(step, child) for step in range(1, s) for _lane in range(k) for child in range(k)]
    return n - 1 <= len(candidates) and len(lane_slots) <= n and s - 1 <= n


def errors_of(**options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**options)
    return [str(problem) for problem in caught.value.problems]


@settings(max_examples=500, deadline=None)
@given(k=TOPK, s=STEPS, n=NODES)
def test_a_triple_is_accepted_exactly_when_it_is_legal(k: int, s: int, n: int) -> None:
    try:
        config = SpeculativeConfig(tree_topk=k, num_steps=s, num_nodes=n)
    except ConfigError:
        assert not is_legal(k, s, n)
    else:
        assert is_legal(k, s, n)
        assert (config.tree_topk, config.num_steps, config.num_nodes) == (k, s, n)


@settings(max_examples=500, deadline=None)
@given(k=TOPK, s=STEPS, n=NODES)
def test_obeying_every_remedy_at_once_gives_a_legal_config(k: int, s: int, n: int) -> None:
    options: dict[str, Any] = {"tree_topk": k, "num_steps": s, "num_nodes": n}
    try:
        SpeculativeConfig(**options)
    except ConfigError as error:
        for problem in error.problems:
            found = re.fullmatch(r"Set (\w+) to (\d+)\.", problem.remedy)
            assert found is not None, problem
            assert problem.option == found[1] and problem.value == options_before(k, s, n)[found[1]]
            options[found[1]] = int(found[2])
        SpeculativeConfig(**options)


def options_before(k: int, s: int, n: int) -> dict[str, int]:
    return {"tree_topk": k, "num_steps": s, "num_nodes": n}


@pytest.mark.parametrize("k", range(1, 17))
@pytest.mark.parametrize("s", range(1, 11))
def test_every_default_starts(k: int, s: int) -> None:
    config = SpeculativeConfig(tree_topk=k, num_steps=s)
    assert is_legal(k, s, config.num_nodes)
    # As near to 32 nodes as is legal.
    if config.num_nodes != 32:
        towards = 1 if config.num_nodes < 32 else -1
        assert not is_legal(k, s, config.num_nodes + towards)


def test_the_derived_sizes() -> None:
    config = SpeculativeConfig(tree_topk=4, num_steps=5)
    assert (config.num_nodes, config.num_entries, config.lane_window) == (32, 68, 16)
    assert (config.max_path_len, config.mask_words, config.is_tree) == (6, 1, True)
    wide = SpeculativeConfig(tree_topk=16, num_steps=2, num_nodes=65)
    assert (wide.mask_words, wide.num_entries, wide.lane_window) == (2, 272, 16)
    assert SpeculativeConfig(tree_topk=16, num_steps=2, num_nodes=64).mask_words == 1
    # A window with fewer nodes than the tree is deep bounds the path.
    assert SpeculativeConfig(tree_topk=2, num_steps=1, num_nodes=2).max_path_len == 2
    assert SpeculativeConfig(tree_topk=2, num_steps=2, num_nodes=2).max_path_len == 2
    chain = SpeculativeConfig(tree_topk=1, num_steps=3)
    assert (chain.num_nodes, chain.num_entries, chain.lane_window, chain.is_tree) == (4, 3, 2, False)


def test_a_message_names_the_option_the_value_the_rule_and_the_remedy() -> None:
    (message,) = errors_of(tree_topk=4, num_steps=5, num_nodes=70)
    assert "num_nodes = 70" in message and "1 + K + (S - 1) * K * K = 69" in message
    assert "tree_topk = 4" in message and "num_steps = 5" in message and "Set num_nodes to 69." in message
    (message,) = errors_of(tree_topk=4, num_steps=5, num_nodes=15)
    assert "(S - 1) * K = 16" in message and "Set num_nodes to 16." in message
    (message,) = errors_of(tree_topk=1, num_steps=5, num_nodes=7)
    assert "N = S + 1 = 6" in message and "Set num_nodes to 6." in message


def test_all_problems_come_at_once() -> None:
    messages = errors_of(
        tree_topk=17,
        num_steps=0,
        num_nodes=300,
        decoding_type="Medusa",
        speculative_model=3,
        host_options={"x": 1},
    )
    options = [message.split(" = ")[0] for message in messages]
    assert sorted(set(options)) == [
        "decoding_type",
        "num_nodes",
        "num_steps",
        "speculative_config.x",
        "speculative_model",
        "tree_topk",
    ]


@pytest.mark.parametrize("name", ["tree_topk", "num_steps", "num_nodes"])
@pytest.mark.parametrize("value", [True, 4.0, "4", [4]])
def test_a_size_is_an_integer_and_a_bool_is_none(name: str, value: object) -> None:
    (message,) = errors_of(**{name: value})
    assert f"{name} = {value!r}: must be an integer, is {type(value).__name__}" in message


def test_a_config_is_frozen_hashable_and_survives_pickling() -> None:
    config = SpeculativeConfig(num_steps=3, host_options={"load_format": "dummy"})
    with pytest.raises(AttributeError):
        config.num_steps = 4  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(config))
    assert again == config and hash(again) == hash(config) and again.is_default_nodes
    assert again.host_options == {"load_format": "dummy"}
    assert replace(config, num_nodes=None, tree_topk=2).num_nodes == 11


def trtllm(**keys: object) -> dict[str, object]:
    tree = {"use_dynamic_tree": True} if "dynamic_tree_max_topK" in keys else {}
    return {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": "head"} | tree | keys


def trtllm_errors(**keys: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_trtllm(trtllm(**keys))
    return [str(problem) for problem in caught.value.problems]


@settings(max_examples=300, deadline=None)
@given(k=st.integers(1, 16), s=st.integers(1, 10), data=st.data())
def test_what_is_written_for_tensorrt_llm_is_read_back(k: int, s: int, data: st.DataObject) -> None:
    counts = [n for n in range(2, 257) if is_legal(k, s, n)]
    config = SpeculativeConfig(
        tree_topk=k, num_steps=s, num_nodes=data.draw(st.sampled_from(counts)), speculative_model="head"
    )
    keys = config.to_trtllm()
    assert SpeculativeConfig.from_trtllm(keys) == config
    assert keys["max_draft_len"] == s
    if k > 1:
        assert keys["max_total_draft_tokens"] == config.num_nodes - 1
    else:
        # A chain is plain Eagle3, with no key of a tree.
        assert set(keys) == {"decoding_type", "max_draft_len", "speculative_model"}


@pytest.mark.parametrize("k", range(2, 17))
@pytest.mark.parametrize("s", range(1, 11))
def test_a_default_starts_on_tensorrt_llm_too(k: int, s: int) -> None:
    config = SpeculativeConfig(tree_topk=k, num_steps=s, speculative_model="head")
    problems = host_problems(RunConfig(engine=EngineConfig(model="m"), speculative=config), "tensorrt_llm")
    total = config.to_trtllm()["max_total_draft_tokens"]
    if (s - 1) * k > 64:
        assert [problem.option for problem in problems] == ["speculative_config.dynamic_tree_max_topK"]
    else:
        assert problems == []
        assert isinstance(total, int)
        assert s <= total <= min(k * s, 63) and is_legal(k, s, total + 1)


def test_the_defaults_of_tensorrt_llm_are_read_as_it_reads_them() -> None:
    tree = SpeculativeConfig.from_trtllm(trtllm(use_dynamic_tree=True, dynamic_tree_max_topK=4))
    assert (tree.tree_topk, tree.num_steps, tree.num_nodes) == (4, 5, 21)
    for keys in ({}, {"use_dynamic_tree": False}, {"use_dynamic_tree": True, "dynamic_tree_max_topK": 1}):
        chain = SpeculativeConfig.from_trtllm(trtllm(**keys))
        assert (chain.tree_topk, chain.num_nodes, chain.is_tree) == (1, 6, False)


def test_the_alias_of_the_head_is_known() -> None:
    keys = trtllm(speculative_model_dir="other") | {"speculative_model": None}
    assert SpeculativeConfig.from_trtllm(keys).speculative_model == "other"
    (message,) = trtllm_errors(speculative_model_dir="other")
    assert "speculative_model_dir = 'other'" in message


def test_problems_are_spelled_as_in_the_file() -> None:
    (message,) = trtllm_errors(dynamic_tree_max_topK=4, max_total_draft_tokens=69)
    assert message.startswith("speculative_config.max_total_draft_tokens = 69: ")
    assert "N = max_total_draft_tokens + 1 = 70" in message and "Set max_total_draft_tokens to 68." in message
    (message,) = trtllm_errors(max_total_draft_tokens=7)
    assert "N = S + 1 = 6" in message and "Set max_total_draft_tokens to 5." in message
    (message,) = trtllm_errors(dynamic_tree_max_topK=4, max_draft_len=11)
    assert message.startswith("speculative_config.max_draft_len = 11: ")


def test_a_tree_is_never_read_as_a_chain() -> None:
    (message,) = trtllm_errors(use_dynamic_tree=False, dynamic_tree_max_topK=4)
    assert "use_dynamic_tree = False" in message and "contradicts dynamic_tree_max_topK = 4" in message
    (message,) = trtllm_errors(use_dynamic_tree=True)
    assert "needs dynamic_tree_max_topK" in message
    # A chain to newer versions, a tree to older ones.
    (message,) = trtllm_errors(use_dynamic_tree=None, dynamic_tree_max_topK=4)
    assert "is needed beside dynamic_tree_max_topK = 4" in message and "use_dynamic_tree to true" in message
    alone = trtllm(use_dynamic_tree=None, dynamic_tree_max_topK=1)
    assert not SpeculativeConfig.from_trtllm(alone).is_tree
    (message,) = trtllm_errors(use_dynamic_tree="yes", dynamic_tree_max_topK=4)
    assert "must be true or false" in message


@pytest.mark.parametrize("value", ["Medusa", "Eagle", "eagle3", "mtp", None, 3])
def test_another_decoding_type_is_refused_with_the_known_ones(value: object) -> None:
    (message,) = trtllm_errors(decoding_type=value)
    assert f"speculative_config.decoding_type = {value!r}" in message and "Eagle3 and MTP" in message
    assert message.endswith("Set decoding_type to MTP." if value == "mtp" else "Set decoding_type to Eagle3.")


def test_mtp_layers_need_no_head_and_have_keys_of_their_own() -> None:
    keys = {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 2,
        "max_total_draft_tokens": 5,
        "relaxed_topk": 1,
    }
    config = SpeculativeConfig.from_trtllm(keys)
    assert (config.decoding_type, config.tree_topk, config.num_nodes) == ("MTP", 2, 6)
    assert config.speculative_model is None and config.to_trtllm() == keys
    for tree in (config, config.as_chain()):
        run = RunConfig(engine=EngineConfig(model="m"), speculative=replace(tree, host_options={}))
        assert host_problems(run, "embedded") == host_problems(run, "tensorrt_llm") == []
    # A head would not be used; TensorRT-LLM's own chain is its own business.
    for tree, hosts in ((config, HOSTS), (config.as_chain(), ("embedded",))):
        named = replace(tree, host_options={}, speculative_model="head")
        run = RunConfig(engine=EngineConfig(model="m"), speculative=named)
        blamed = [host for host in HOSTS if host_problems(run, host)]  # type: ignore[arg-type]
        assert blamed == list(hosts)
        assert host_problems(run, "embedded")[0].option == "speculative_config.speculative_model"
    # Relaxed acceptance is TensorRT-LLM's.
    run = RunConfig(
        engine=EngineConfig(model="m"), speculative=replace(config, host_options={"relaxed_topk": 3})
    )
    assert [problem.option for problem in host_problems(run, "embedded")] == [
        "speculative_config.relaxed_topk"
    ]


@pytest.mark.parametrize("kind", ["Eagle3", "MTP"])
def test_a_trees_chain_has_its_drafter_and_its_steps(kind: str) -> None:
    head = "head" if kind == "Eagle3" else None
    tree = SpeculativeConfig(tree_topk=4, num_steps=3, decoding_type=kind, speculative_model=head)
    chain = tree.as_chain()
    assert not chain.is_tree and (chain.num_steps, chain.num_nodes) == (3, 4)
    assert (chain.decoding_type, chain.speculative_model) == (kind, head)


@pytest.mark.parametrize(
    ("kind", "key", "remedy"),
    [
        ("MTP", "eagle_choices", "Remove it: another decoding_type has it."),
        ("Eagle3", "relaxed_topk", "Remove it: another decoding_type has it."),
        ("MTP", "num_nextn_predict_layers", "Write max_draft_len."),
        ("MTP", "relaxed_topK", "Did you mean relaxed_topk?"),
    ],
)
def test_a_key_of_another_decoding_type_is_unknown(kind: str, key: str, remedy: str) -> None:
    (message,) = trtllm_errors(decoding_type=kind, **{key: 1})
    assert f"speculative_config.{key} = 1: is not a key of TensorRT-LLM's {kind}DecodingConfig" in message
    assert message.endswith(remedy)


def test_keys_of_tensorrt_llm_without_a_field_are_kept() -> None:
    config = SpeculativeConfig.from_trtllm(trtllm(eagle3_one_model=False, sa_config={"threshold": 4}))
    assert config.host_options == {"eagle3_one_model": False, "sa_config": {"threshold": 4}}
    assert config.to_trtllm() == trtllm(eagle3_one_model=False, sa_config={"threshold": 4})
    messages = errors_of(host_options={"max_draft_len": 3})
    assert messages == ["host_options = 'max_draft_len': has a field of its own. Use the field instead."]


@pytest.mark.parametrize("value", [True, False])
def test_rejection_sampling_is_read_and_written(value: bool) -> None:
    config = SpeculativeConfig.from_trtllm(trtllm(use_rejection_sampling=value))
    assert config.use_rejection_sampling is value and config.host_options == {}
    assert config.to_trtllm().get("use_rejection_sampling", False) is value
    assert SpeculativeConfig.from_trtllm(config.to_trtllm()) == config
    assert not SpeculativeConfig().use_rejection_sampling


def test_a_rejection_sampling_that_is_no_flag_is_an_error() -> None:
    (message,) = trtllm_errors(use_rejection_sampling=1)
    assert "speculative_config.use_rejection_sampling = 1: must be true or false" in message
    (message,) = errors_of(use_rejection_sampling="no")
    assert message.startswith("use_rejection_sampling = 'no'")
