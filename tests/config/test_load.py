"""Reading a file, the options of the engine and of a request, and what each host refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_tree.config import (
    EngineConfig,
    RunConfig,
    SamplingParams,
    SpeculativeConfig,
    host_problems,
    load_config,
    read_config,
)
from trtllm_tree.config.host_rules import HOSTS, TREE_ENVIRONMENT, trtllm_size_problems
from trtllm_tree.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[2] / "configs"
TREE = {
    "decoding_type": "Eagle3",
    "speculative_model": "head",
    "max_draft_len": 5,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 20,
}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def problems_of(tmp_path: Path, content: object, **overrides: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, content), overrides=overrides)
    problems = {problem.option: problem for problem in caught.value.problems}
    assert len(problems) == len(caught.value.problems), "an option was reported twice"
    return problems


def test_every_part_of_a_file_arrives(tmp_path: Path) -> None:
    content = {
        "model": "some/dir",
        "dtype": "bfloat16",
        "max_batch_size": 3,
        "max_num_tokens": 77,
        "max_seq_len": 500,
        "kv_cache_config": {"tokens_per_block": 64, "max_tokens": 4096, "dtype": "fp8"}
        | {"copy_on_partial_reuse": False},
        "speculative_config": TREE | {"load_format": "dummy"},
        "env_overrides": {"TLLM_TREE_ENABLE": "1", "LEVEL": 2},
        "attn_backend": "TRTLLM",
        "cuda_graph_config": {"enable_padding": True},
        "tensor_parallel_size": 2,
    }
    config = load_config(write(tmp_path, content), overrides={"device": "cpu"})
    assert config.engine == EngineConfig(
        model="some/dir",
        dtype="bfloat16",
        device="cpu",
        max_batch_size=3,
        max_num_tokens=77,
        max_seq_len=500,
        tokens_per_block=64,
        kv_cache_dtype="fp8",
        kv_cache_tokens=4096,
    )
    assert config.speculative == SpeculativeConfig(
        num_nodes=21, speculative_model="head", host_options={"load_format": "dummy"}
    )
    assert config.env_overrides == {"TLLM_TREE_ENABLE": "1", "LEVEL": "2"}
    assert config.extra == {
        "attn_backend": "TRTLLM",
        "cuda_graph_config": {"enable_padding": True},
        "tensor_parallel_size": 2,
        "kv_cache_config": {"copy_on_partial_reuse": False},
    }


def test_an_empty_file_is_all_defaults_and_null_is_unset(tmp_path: Path) -> None:
    defaults = RunConfig(engine=EngineConfig(model=""))
    assert load_config(write(tmp_path, "")) == defaults
    empty = "model:\nmax_batch_size:\nkv_cache_config:\nspeculative_config:\nenv_overrides:\n"
    assert load_config(write(tmp_path, empty)) == defaults


def test_overrides_are_laid_over_the_file_section_by_section(tmp_path: Path) -> None:
    alias = {key: value for key, value in TREE.items() if key != "speculative_model"}
    path = write(tmp_path, {"model": "a", "speculative_config": alias | {"speculative_model_dir": "b"}})
    config = load_config(path, overrides={"model": "c", "speculative_config": {"speculative_model": "d"}})
    assert config.engine.model == "c"
    assert config.speculative == SpeculativeConfig(num_nodes=21, speculative_model="d")
    problems = problems_of(tmp_path, {"speculative_config": 5}, speculative_config={"speculative_model": "d"})
    assert list(problems) == ["speculative_config"]


def test_all_errors_of_a_file_come_at_once_with_the_nearest_key(tmp_path: Path) -> None:
    content = {
        "dtyp": "auto",
        "dtype": "bfloat",
        "tokens_per_block": 32,
        "max_batch_size": True,
        "max_seq_len": -1,
        "kv_cache_config": {"max_token": 5, "tokens_per_block": 24, "max_num_tokens": 4},
        "cuda_graph_config": {"paddings": 1, "batch_size": [1]},
        "speculative_config": TREE | {"dynamic_tree_max_topk": 4, "max_draft_len": 0, "num_nodes": 3},
        "env_overrides": {"A": True},
        "device": "cpu",
    }
    problems = problems_of(tmp_path, content)
    remedies = {option: problem.remedy for option, problem in problems.items()}
    assert remedies == {
        "dtyp": "Did you mean dtype?",
        "dtype": "Set dtype to bfloat16.",
        "tokens_per_block": "Move it under kv_cache_config.",
        "max_batch_size": "Set max_batch_size to 8.",
        "max_seq_len": "Leave it out to have it chosen.",
        "kv_cache_config.max_token": "Did you mean max_tokens?",
        "kv_cache_config.tokens_per_block": "Set kv_cache_config.tokens_per_block to 32.",
        "kv_cache_config.max_num_tokens": "Move it to the top level.",
        "cuda_graph_config.paddings": "Did you mean enable_padding?",
        "cuda_graph_config.batch_size": "Did you mean batch_sizes?",
        "speculative_config.dynamic_tree_max_topk": "Did you mean dynamic_tree_max_topK?",
        "speculative_config.max_draft_len": "Set max_draft_len to 1.",
        "speculative_config.num_nodes": (
            "Write max_total_draft_tokens, which is num_nodes - 1: it does not count the root."
        ),
        "speculative_config.max_total_draft_tokens": "Set max_total_draft_tokens to 4.",
        "env_overrides.A": "Put it in quotes.",
        "device": "Leave it out: the device is chosen on the command line or in Python.",
    }
    assert problems["dtype"].value == "bfloat" and problems["max_batch_size"].value is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: a\nkv_cache_config: {max_tokens: 3\ndtype: x\n", "line 3, column 6"),
        ("model: a\n\tdtype: auto\n", "line 2, column 1"),
        ("model: a\ndtype: auto\nmodel: b\n", "line 3, column 1"),
        ("- model\n- dtype\n", "must be a mapping"),
        ("kv_cache_config: [1]\n", "kv_cache_config = [1]: must be a mapping"),
        ("model: \x07\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_problem_that_says_where(
    tmp_path: Path, text: str, says: str
) -> None:
    (problem,) = problems_of(tmp_path, text).values()
    assert says in str(problem)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*cannot be read"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_beside_its_problems_a_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    section = TREE | {"max_draft_len": 99, "max_total_draft_tokens": 40, "sa_config": {"threshold": 2}}
    path = write(tmp_path, {"model": "m", "dtype": "x", "speculative_config": section})
    config, problems = read_config(path)
    assert {problem.option for problem in problems} == {"dtype", "speculative_config.max_draft_len"}
    assert config.engine.model == "m" and config.speculative is not None
    assert config.speculative.speculative_model == "head"
    assert config.speculative.host_options == {"sa_config": {"threshold": 2}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": 3}, "model = 3"),
        ({"dtype": "fp16"}, "must be one of auto, float32, bfloat16, float16"),
        ({"device": "gpu"}, "must be one of auto, cpu, cuda"),
        ({"max_batch_size": 0}, "max_batch_size = 0: must be a positive integer"),
        ({"max_num_tokens": 1.5}, "max_num_tokens = 1.5: must be a positive integer"),
        ({"max_seq_len": "9"}, "max_seq_len = '9': must be a positive integer"),
        ({"tokens_per_block": 8}, "a page holds 16, 32 or 64 rows"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "auto (the model's dtype) or fp8 (E4M3, unscaled)"),
        ({"kv_cache_dtype": "int8"}, "auto (the model's dtype) or fp8 (E4M3, unscaled)"),
        ({"kv_cache_dtype": None}, "auto (the model's dtype) or fp8 (E4M3, unscaled)"),
        ({"kv_cache_tokens": False}, "kv_cache_tokens = False: must be a positive integer"),
        ({"kv_cache_tokens": 63, "tokens_per_block": 64}, "at least one page of 64 rows"),
    ],
)
def test_an_engine_option_out_of_range_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", **options})
    (problem,) = caught.value.problems
    assert says in str(problem)


def test_a_request_is_greedy_and_valid_by_default() -> None:
    assert SamplingParams().validate() == []
    params = SamplingParams(
        max_tokens=1, temperature=0.0, top_p=1, top_k=0, seed=7, stop=["a", "b"], stop_token_ids=[0, 5]
    )
    assert params.validate() == []
    assert params.stop_strings == ["a", "b"]
    assert SamplingParams(stop="x").stop_strings == ["x"] and SamplingParams().stop_strings == []


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", 0, "positive integer"),
        ("max_tokens", True, "positive integer"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("nan"), ">= 0"),
        ("temperature", 2e6, "at most 1000000"),
        ("temperature", "0.7", "must be a number"),
        ("min_p", -0.1, "0 <= min_p <= 1"),
        ("min_p", 1.5, "0 <= min_p <= 1"),
        ("top_p", 0, "0 < top_p <= 1"),
        ("top_p", 1.01, "0 < top_p <= 1"),
        ("top_k", -1, ">= 0"),
        ("seed", -1, "0 <= seed"),
        ("seed", 2**64, "0 <= seed"),
        ("stop", "", "non-empty string"),
        ("stop", ["a", 3], "non-empty string"),
        ("stop_token_ids", [1, -2], "token ids"),
        ("stop_token_ids", 5, "token ids"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", "no", "true or false"),
        ("skip_special_tokens", None, "true or false"),
        ("n", 0, "positive integer"),
        ("n", 2, "one completion per prompt"),
    ],
)
def test_a_request_option_that_cannot_be_honoured_is_named_not_raised(
    name: str, value: Any, rule: str
) -> None:
    (problem,) = SamplingParams(**{name: value}).validate()
    assert problem.option == name and problem.value is value
    assert rule in problem.rule and problem.remedy


def test_all_wrong_options_of_a_request_are_found_together() -> None:
    problems = SamplingParams(max_tokens=-1, temperature=-2, n=3, stop=[""]).validate()
    assert {problem.option for problem in problems} == {"max_tokens", "temperature", "n", "stop"}


def run_config(**extra: object) -> RunConfig:
    speculative = SpeculativeConfig(num_nodes=21, speculative_model="head")
    return RunConfig(engine=EngineConfig(model="m"), speculative=speculative, extra=extra)


def refused(config: RunConfig, host: Any) -> list[str]:
    return [problem.option for problem in host_problems(config, host)]


@pytest.mark.parametrize(
    ("option", "value", "default"),
    [
        ("attn_backend", "FLASHINFER", "TRTLLM"),
        ("tensor_parallel_size", 2, 1),
        ("guided_decoding_backend", "llguidance", None),
        ("cuda_graph_config", {"enable_padding": True}, {}),
        ("trust_remote_code", True, False),
        ("kv_cache_config.enable_block_reuse", True, False),
        ("kv_cache_config.free_gpu_memory_fraction", 0.5, 0.9),
        ("speculative_config.eagle_choices", [[0]], None),
        ("speculative_config.eagle3_one_model", False, True),
    ],
)
def test_the_embedded_host_refuses_by_name_what_it_does_not_honour(
    option: str, value: object, default: object
) -> None:
    def config(setting: object) -> RunConfig:
        section, _, key = option.rpartition(".")
        if section == "speculative_config":
            speculative = SpeculativeConfig(speculative_model="head", host_options={key: setting})
            return RunConfig(engine=EngineConfig(model="m"), speculative=speculative)
        return run_config(**({section: {key: setting}} if section else {key: setting}))

    (problem,) = host_problems(config(value), "embedded")
    assert problem.option == option and problem.value == value and problem.remedy.endswith(".")
    assert host_problems(config(default), "embedded") == []


def test_keys_that_only_steer_tensorrt_llm_are_no_problem() -> None:
    for value in (True, False):
        config = run_config(disable_overlap_scheduler=value, enable_chunked_prefill=value)
        assert refused(config, "embedded") == refused(config, "tensorrt_llm") == []


@pytest.mark.parametrize(
    ("k", "s", "n", "option", "remedy"),
    [
        (4, 5, 32, "max_total_draft_tokens", "Set max_total_draft_tokens to 20 (num_nodes is one more)."),
        (8, 2, 8, "max_total_draft_tokens", None),
        (4, 3, 8, "max_total_draft_tokens", None),
        (2, 5, 8, "max_total_draft_tokens", None),
        (2, 4, 6, "max_total_draft_tokens", None),
        (2, 2, 2, "max_total_draft_tokens", "Set max_total_draft_tokens to 2 (num_nodes is one more)."),
        (16, 4, 65, "max_total_draft_tokens", "Set max_total_draft_tokens to 63 (num_nodes is one more)."),
        (16, 10, 200, "dynamic_tree_max_topK", "Set dynamic_tree_max_topK to 7."),
    ],
)
def test_tensorrt_llm_bounds_a_tree_more_tightly(
    k: int, s: int, n: int, option: str, remedy: str | None
) -> None:
    speculative = SpeculativeConfig(tree_topk=k, num_steps=s, num_nodes=n, speculative_model="head")
    config = RunConfig(engine=EngineConfig(model="m"), speculative=speculative)
    assert refused(config, "embedded") == []
    problems = host_problems(config, "tensorrt_llm")
    if remedy is None:
        assert problems == [] and s <= n - 1 <= min(k * s, 63)
    else:
        assert {(problem.option, problem.remedy) for problem in problems} == {
            (f"speculative_config.{option}", remedy)
        }


def test_on_tensorrt_llm_a_tree_refuses_what_a_chain_allows() -> None:
    extra = {
        "pipeline_parallel_size": 2,
        "enable_attention_dp": True,
        "max_beam_width": 4,
        "attn_backend": "FLASHINFER",
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5},
        "tensor_parallel_size": 8,
    }
    options = {"sa_config": {}, "eagle3_one_model": False, "load_format": "dummy"}
    tree = SpeculativeConfig(speculative_model="head", host_options=options)
    engine = EngineConfig(model="m", kv_cache_dtype="nvfp4")
    assert sorted(refused(RunConfig(engine=engine, speculative=tree, extra=extra), "tensorrt_llm")) == [
        "attn_backend",
        "enable_attention_dp",
        "kv_cache_config.dtype",
        "max_beam_width",
        "pipeline_parallel_size",
        "speculative_config.eagle3_one_model",
        "speculative_config.sa_config",
    ]
    chain = SpeculativeConfig(tree_topk=1, speculative_model="head", host_options=options)
    assert refused(RunConfig(engine=engine, speculative=chain, extra=extra), "tensorrt_llm") == []


@pytest.mark.parametrize("value", ["auto", "fp8"])
def test_an_fp8_cache_is_an_option_of_both_hosts(tmp_path: Path, value: str) -> None:
    content = {"model": "m", "kv_cache_config": {"dtype": value}, "speculative_config": TREE}
    config = load_config(write(tmp_path, content))
    assert config.engine.kv_cache_dtype == value
    assert refused(config, "embedded") == refused(config, "tensorrt_llm") == []


def test_an_nvfp4_cache_is_refused_by_the_embedded_host_and_with_trees(tmp_path: Path) -> None:
    section = {"kv_cache_config": {"dtype": "nvfp4"}, "speculative_config": TREE}
    config = load_config(write(tmp_path, section))
    for host in ("embedded", "tensorrt_llm"):
        (problem,) = host_problems(config, host)
        assert (problem.option, problem.value) == ("kv_cache_config.dtype", "nvfp4")
        assert "auto (the model's dtype) or fp8 (E4M3, unscaled)" in problem.rule
        assert problem.remedy == "Set kv_cache_config.dtype to fp8 or auto."


def test_speculation_needs_a_head_unless_the_model_is_the_demo() -> None:
    speculative = SpeculativeConfig()
    for model, expected in (("m", ["speculative_config.speculative_model"]), ("demo", [])):
        config = RunConfig(engine=EngineConfig(model=model), speculative=speculative)
        assert refused(config, "embedded") == expected


def test_an_mtp_layer_needs_no_head_and_takes_none_on_the_embedded_host() -> None:
    for head, expected in ((None, []), ("h", ["speculative_config.speculative_model"])):
        speculative = SpeculativeConfig(decoding_type="MTP", speculative_model=head)
        config = RunConfig(engine=EngineConfig(model="m"), speculative=speculative)
        assert refused(config, "embedded") == expected


@pytest.mark.parametrize(
    ("environment", "rejection", "option", "rule"),
    [
        (
            {"TLLM_TREE_VERIFY": "typical"},
            False,
            "TLLM_TREE_VERIFY",
            "must be one of greedy, gumbel, rejection",
        ),
        (
            {"TLLM_TREE_VERIFY": "gumbel"},
            True,
            "TLLM_TREE_VERIFY",
            "contradicts use_rejection_sampling = True",
        ),
        (
            {"TLLM_TREE_ENABLE": "1", "TLLM_FMHA_LIBS": "flashinfer_trtllm_gen,fallback"},
            False,
            "TLLM_FMHA_LIBS",
            "names no trtllm_tree",
        ),
    ],
)
def test_variables_of_the_plugin_are_checked_where_a_tree_is_for_tensorrt_llm(
    environment: dict[str, str], rejection: bool, option: str, rule: str
) -> None:
    spec = SpeculativeConfig(num_nodes=21, speculative_model="h", use_rejection_sampling=rejection)
    config = RunConfig(engine=EngineConfig(model="m"), speculative=spec, env_overrides=environment)
    (problem,) = host_problems(config, "tensorrt_llm")
    assert problem.option == f"env_overrides.{option}" and rule in problem.rule
    assert host_problems(config, "embedded") == ([] if option == "TLLM_FMHA_LIBS" else [problem])
    chain = SpeculativeConfig(tree_topk=1, speculative_model="h")
    plain = RunConfig(engine=EngineConfig(model="m"), speculative=chain, env_overrides=environment)
    assert host_problems(plain, "tensorrt_llm") == []


@pytest.mark.parametrize("libraries", ["+trtllm_tree", "trtllm_tree,fallback", "-x, +trtllm_tree"])
@pytest.mark.parametrize(
    ("mode", "rejection"), [("greedy", False), ("rejection", True), ("rejection", False)]
)
def test_variables_that_name_the_plugin_are_right(libraries: str, mode: str, rejection: bool) -> None:
    environment = {"TLLM_TREE_ENABLE": "1", "TLLM_FMHA_LIBS": libraries, "TLLM_TREE_VERIFY": mode}
    spec = SpeculativeConfig(num_nodes=21, speculative_model="h", use_rejection_sampling=rejection)
    config = RunConfig(engine=EngineConfig(model="m"), speculative=spec, env_overrides=environment)
    assert host_problems(config, "tensorrt_llm") == []


@pytest.mark.parametrize(
    ("mode", "rejection", "remedy"),
    [
        ("greedy", False, "temperature 0"),
        ("rejection", False, "use_rejection_sampling to true"),
        ("rejection", True, None),
        ("gumbel", False, None),
    ],
)
def test_the_embedded_host_takes_a_verify_mode_only_where_the_config_says_the_same(
    mode: str, rejection: bool, remedy: str | None
) -> None:
    spec = SpeculativeConfig(speculative_model="h", use_rejection_sampling=rejection)
    environment = {"TLLM_TREE_VERIFY": mode}
    config = RunConfig(engine=EngineConfig(model="m"), speculative=spec, env_overrides=environment)
    found = [(problem.option, problem.remedy) for problem in host_problems(config, "embedded")]
    assert [option for option, _ in found] == (["env_overrides.TLLM_TREE_VERIFY"] if remedy else [])
    assert remedy is None or remedy in found[0][1]
    chain = SpeculativeConfig(tree_topk=1, speculative_model="h")
    plain = RunConfig(engine=EngineConfig(model="m"), speculative=chain, env_overrides=environment)
    assert host_problems(plain, "embedded") == []


def test_the_shipped_configs_load() -> None:
    demo = load_config(CONFIGS / "demo.yaml")
    assert demo.engine == EngineConfig(model="demo", dtype="float32")
    assert demo.speculative == SpeculativeConfig(
        tree_topk=4, num_steps=5, num_nodes=32, speculative_model="demo"
    )
    assert host_problems(demo, "embedded") == []
    tree = load_config(CONFIGS / "tree_eagle.yaml")
    assert tree.engine.model == "" and tree.env_overrides == TREE_ENVIRONMENT | {"TLLM_TREE_VERIFY": "gumbel"}
    assert tree.speculative is not None
    assert (tree.speculative.tree_topk, tree.speculative.num_steps, tree.speculative.num_nodes) == (4, 6, 24)
    assert host_problems(tree, "embedded") == host_problems(tree, "tensorrt_llm") == []


# What the hosts say to each file of configs/, by option.
SHIPPED: dict[str, dict[str, list[str]]] = {
    "demo": {"tensorrt_llm": ["speculative_config.max_total_draft_tokens"]},
    "tree_eagle": {},
    "tree_eagle_fp8": {},
    "tree_mla": {},
    "tree_mtp": {},
}


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_each_shipped_config_is_right_for_a_host_or_refused_by_name(path: Path) -> None:
    config = load_config(path)
    assert config.speculative is not None and config.speculative.is_tree
    for host in HOSTS:
        assert refused(config, host) == SHIPPED[path.stem].get(host, [])
    if path.stem != "demo":
        assert config.env_overrides == TREE_ENVIRONMENT | {"TLLM_TREE_VERIFY": "gumbel"}
        assert trtllm_size_problems(config.speculative) == []
