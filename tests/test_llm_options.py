"""The keyword arguments of `LLM` on the embedded host: read as a file is, and nothing of them ignored."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_tree import LLM, ConfigError, SpeculativeConfig
from trtllm_tree.llm_options import read_options, read_speculative

SECTION = {
    "decoding_type": "Eagle3",
    "speculative_model": "h",
    "max_draft_len": 3,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 2,
    "max_total_draft_tokens": 5,
}


def problems_of(model: Any = "demo", **options: Any) -> dict[str, str]:
    """The remedies of an LLM that is refused, by option."""
    with pytest.raises(ConfigError) as caught:
        LLM(model, **options)
    return {problem.option: problem.remedy for problem in caught.value.problems}


def test_options_that_nobody_knows_are_named_with_the_nearest() -> None:
    found = problems_of(max_batchsize=3, tree_topk=4, quark=1, dtyp="float32", max_seq_len=-1)
    assert found == {
        "max_batchsize": "Did you mean max_batch_size?",
        "tree_topk": "Set it in speculative_config=SpeculativeConfig(...).",
        "quark": "Remove it.",
        "dtyp": "Did you mean dtype?",
        "max_seq_len": "Leave it out to have it chosen.",
    }


def test_options_of_tensorrt_llm_are_refused_by_name_as_in_a_file() -> None:
    spec = SpeculativeConfig(
        host_options={"eagle3_layers_to_capture": [0, 1, 2], "max_concurrency": 4, "posterior_threshold": 0.3}
    )
    found = problems_of(
        "m",
        speculative_config=spec,
        tensor_parallel_size=2,
        kv_cache_dtype="nvfp4",
        kv_cache_config={"free_gpu_memory_fraction": 0.5, "max_token": 4},
    )
    assert found == {"kv_cache_config.max_token": "Did you mean max_tokens?"}
    found = problems_of(
        "m",
        speculative_config=spec,
        tensor_parallel_size=2,
        kv_cache_dtype="nvfp4",
        kv_cache_config={"free_gpu_memory_fraction": 0.5},
    )
    assert (
        found.pop("kv_cache_config.free_gpu_memory_fraction") == "Size the pool with kv_cache_tokens instead."
    )
    assert found.pop("kv_cache_dtype") == "Set kv_cache_dtype to fp8 or auto."
    assert found.pop("speculative_model") == "Name its directory in speculative_model."
    assert set(found) == {
        "tensor_parallel_size",
        "speculative_config.eagle3_layers_to_capture",
        "speculative_config.max_concurrency",
        "speculative_config.posterior_threshold",
    }


def test_a_kv_cache_config_sets_what_it_sets_in_a_file() -> None:
    section = {"max_tokens": 640, "tokens_per_block": 64, "dtype": "fp8", "enable_block_reuse": False}
    like_pydantic = SimpleNamespace(model_dump=lambda exclude_unset: section)
    for given in (section, like_pydantic):
        config = read_options("m", None, {"kv_cache_config": given}, dtype="auto")
        engine = config.engine
        assert (engine.kv_cache_tokens, engine.tokens_per_block, engine.kv_cache_dtype) == (640, 64, "fp8")
        assert config.extra == {"kv_cache_config": {"enable_block_reuse": False}}
    found = problems_of(kv_cache_tokens=64, kv_cache_config={"max_tokens": 640})
    assert found == {"kv_cache_config.max_tokens": "Remove one of them."}
    assert list(problems_of(kv_cache_config=5, env_overrides=[1])) == ["kv_cache_config", "env_overrides"]


def test_environment_variables_are_set_as_for_a_file(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OF_THIS_TEST", raising=False)
    with LLM(tiny_target, max_seq_len=64, tensor_parallel_size=1, env_overrides={"OF_THIS_TEST": 5}) as llm:
        assert os.environ.pop("OF_THIS_TEST") == "5"
        assert llm.generate("abc").finished


def test_a_mapping_is_a_section_of_a_file_and_checked_as_one() -> None:
    spec = read_speculative(SECTION)
    assert spec == SpeculativeConfig(tree_topk=2, num_steps=3, num_nodes=6, speculative_model="h")
    found = problems_of(
        speculative_config=SECTION | {"tree_topk": 4, "dynamic_tree_max_topK": 17}, max_batchsize=1
    )
    assert found == {
        "max_batchsize": "Did you mean max_batch_size?",
        "speculative_config.tree_topk": "Write dynamic_tree_max_topK.",
        "speculative_config.dynamic_tree_max_topK": "Set dynamic_tree_max_topK to 16.",
        "speculative_config.max_total_draft_tokens": "Set max_total_draft_tokens to 31.",
    }


@pytest.mark.parametrize("value", ["eagle3", 4, SpeculativeConfig, object()])
def test_what_is_no_speculative_config_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculative(value)
    (problem,) = caught.value.problems
    assert problem.option == "speculative_config" and problem.value is value
    assert "must be a SpeculativeConfig" in problem.rule and "tree_topk" in problem.remedy


def test_paths_are_names_of_directories() -> None:
    assert read_options(Path("a/b"), None, {}, dtype="auto").engine.model == os.path.join("a", "b")
    assert SpeculativeConfig(speculative_model=Path("h")).speculative_model == "h"  # type: ignore[arg-type]
