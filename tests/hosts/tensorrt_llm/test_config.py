"""`SpeculativeConfig` as TensorRT-LLM's own object: kept by its models, pickled, and run by the embedded host."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

import trtllm_tree
from tests.doubles.tensorrt_llm.install import runtime_double
from trtllm_tree import LLM, ConfigError, config
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.translate import is_effective_tree, plain_config

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
_CLASSES = "trtllm_tree.hosts.tensorrt_llm.config"


@pytest.fixture(params=["new", "old"])
def llm_args(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """TensorRT-LLM's configuration, in a process that has imported it."""
    sys.modules.pop(_CLASSES, None)
    with runtime_double(tmp_path / "double", request.param):
        import_module("tensorrt_llm")
        yield import_module("tensorrt_llm.llmapi.llm_args")
    sys.modules.pop(_CLASSES, None)


def config_of(**options: Any) -> Any:
    return trtllm_tree.SpeculativeConfig(**{"speculative_model": "head", **options})


def test_without_tensorrt_llm_it_is_our_plain_config() -> None:
    assert "tensorrt_llm" not in sys.modules
    made = config_of(tree_topk=2, num_steps=3)
    assert type(made) is config.SpeculativeConfig
    assert made == config.SpeculativeConfig(tree_topk=2, num_steps=3, speculative_model="head")
    # A head is named later, or comes with the demo.
    assert trtllm_tree.SpeculativeConfig().speculative_model is None


def test_a_tree_is_an_instance_of_a_subclass_that_llm_keeps(llm_args: Any) -> None:
    made = config_of(tree_topk=4, num_steps=6, num_nodes=24)
    assert isinstance(made, llm_args.Eagle3DecodingConfig) and type(made) is not llm_args.Eagle3DecodingConfig
    assert made.decoding_type == "Eagle3" and is_effective_tree(made)
    assert (made.use_dynamic_tree, made.dynamic_tree_max_topK) == (True, 4)
    assert (made.max_draft_len, made.max_total_draft_tokens, made.tokens_per_gen_step) == (6, 23, 24)
    assert (made.tree_topk, made.num_steps, made.num_nodes, made.num_entries) == (4, 6, 24, 84)
    args = llm_args.TorchLlmArgs(model="m", speculative_config=made)
    assert args.speculative_config is made
    again = pickle.loads(pickle.dumps(args)).speculative_config
    assert type(again) is type(made) and again == made


def test_a_rank_that_unpickles_it_imports_our_module(llm_args: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(config_of(tree_topk=2, num_steps=3)))
    code = f"import pickle, sys; c = pickle.load(open({str(path)!r}, 'rb')); print(type(c).__module__, c.num_nodes)"
    paths = [str(ROOT), *(entry for entry in sys.path if "double" in entry)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{_CLASSES} 7"


def test_one_lane_gives_the_plain_class(llm_args: Any) -> None:
    made = config_of(tree_topk=1, num_steps=4)
    assert type(made) is llm_args.Eagle3DecodingConfig and not is_effective_tree(made)
    assert made.max_draft_len == made.max_total_draft_tokens == 4
    assert not made.use_dynamic_tree and made.dynamic_tree_max_topK is None


def test_mtp_layers_are_a_subclass_of_their_own(llm_args: Any) -> None:
    made = trtllm_tree.SpeculativeConfig(decoding_type="MTP", tree_topk=3, num_steps=2)
    assert isinstance(made, llm_args.MTPDecodingConfig) and type(made) is not llm_args.MTPDecodingConfig
    assert made.decoding_type == "MTP" and (made.tree_topk, made.num_nodes) == (3, 7)
    assert llm_args.TorchLlmArgs(model="m", speculative_config=made).speculative_config is made
    chain = trtllm_tree.SpeculativeConfig(decoding_type="MTP", tree_topk=1, num_steps=2)
    assert type(chain) is llm_args.MTPDecodingConfig
    # Versions that have the second field go by it alone.
    assert chain.max_draft_len == chain.num_nextn_predict_layers == 2
    assert made.max_draft_len == made.num_nextn_predict_layers == 2


def test_its_options_arrive_and_come_back(llm_args: Any) -> None:
    options = {"eagle3_layers_to_capture": {1, 2}, "max_concurrency": 4}
    made = config_of(tree_topk=2, num_steps=3, host_options=options, use_rejection_sampling=True)
    assert made.eagle3_layers_to_capture == {1, 2} and made.use_rejection_sampling
    back = plain_config(made)
    assert back == made.plain and type(back) is config.SpeculativeConfig
    assert back.host_options == options and back.use_rejection_sampling
    assert (back.tree_topk, back.num_steps, back.num_nodes) == (2, 3, 7)
    # As validators of newer versions leave it.
    made.draft_len_schedule, made.num_eagle_layers = {4: 3}, 3
    assert plain_config(made) == back


def test_what_a_file_gives_a_rank_is_read_alike(llm_args: Any) -> None:
    keys = {
        "max_draft_len": 6,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 23,
    }
    theirs = llm_args.Eagle3DecodingConfig(**keys, speculative_model="head")
    assert plain_config(theirs) == config_of(tree_topk=4, num_steps=6, num_nodes=24).plain
    chain = llm_args.Eagle3DecodingConfig(max_draft_len=3, speculative_model="head")
    assert plain_config(chain) == config.SpeculativeConfig(tree_topk=1, num_steps=3, speculative_model="head")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tree_topk": 17}, "1 <= tree_topk <= 16"),
        ({"tree_topk": 4, "num_steps": 5, "num_nodes": 32}, "max_total_draft_tokens <= K * S"),
        ({"tree_topk": 4, "speculative_model": None}, "needs a draft head"),
        ({"tree_topk": 4, "host_options": {"eagle3_model_arch": "gpt2"}}, "TensorRT-LLM refuses it"),
    ],
)
def test_what_tensorrt_llm_cannot_take_is_a_config_error(
    llm_args: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says.replace("*", r"\*")):
        config_of(**options)


def test_a_version_without_trees_is_told_apart(llm_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = import_module(_CLASSES)
    without = {name: None for name in llm_args.MTPDecodingConfig.model_fields if "tree" not in name}
    old = type("MTPDecodingConfig", (llm_args.MTPDecodingConfig,), {})
    monkeypatch.setattr(old, "__pydantic_fields__", without)
    monkeypatch.setitem(made._CLASSES, "MTP", (made.TreeMTPConfig, old))
    with pytest.raises(ConfigError, match="has no dynamic trees"):
        trtllm_tree.SpeculativeConfig(decoding_type="MTP", tree_topk=2)


def test_a_tree_is_refused_with_all_that_the_version_lacks_and_a_chain_is_not(
    llm_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = probe().resolved["fmha", "FMHA_LIBS"].path.rpartition(".")[0]
    monkeypatch.delattr(import_module(registry), "FMHA_LIBS")
    monkeypatch.delattr(import_module("tensorrt_llm._torch.speculative.eagle3"), "Eagle3OneModelWorker")
    with pytest.raises(trtllm_tree.UnsupportedError) as caught:
        config_of(tree_topk=2)
    options = " ".join(problem.option for problem in caught.value.problems)
    assert "FMHA_LIBS" in options and "Eagle3OneModelWorker" in options
    assert type(config_of(tree_topk=1)) is llm_args.Eagle3DecodingConfig


def test_an_older_name_of_the_head_is_used_where_it_is_the_only_one(
    llm_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = import_module(_CLASSES)

    class Old(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        max_draft_len: int
        speculative_model_dir: str

    monkeypatch.setitem(made._CLASSES, "Eagle3", (made.TreeEagle3Config, Old))
    chain = config_of(tree_topk=1, num_steps=2)
    assert type(chain) is Old and chain.speculative_model_dir == "head"


@pytest.mark.parametrize("topk", [1, 3])
def test_the_embedded_host_runs_the_same_object(
    llm_args: Any, tiny_target: Path, tiny_head: Path, device: str, topk: int
) -> None:
    options: dict[str, Any] = {"tree_topk": topk, "num_steps": 3, "speculative_model": str(tiny_head)}
    theirs = trtllm_tree.SpeculativeConfig(**options)
    assert isinstance(theirs, llm_args.Eagle3DecodingConfig)
    ours = config.SpeculativeConfig(**options, num_nodes=10 if topk == 3 else None)  # type: ignore[arg-type]
    params = trtllm_tree.SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for spec in (theirs, ours):
        common: dict[str, Any] = {"device": device, "max_seq_len": 128, "cuda_graphs": False}
        with LLM(str(tiny_target), speculative_config=spec, **common) as llm:
            assert llm.speculative_config == ours
            found.append(llm.generate("a quick fox", params).outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["tree_eagle", "tree_eagle_fp8", "tree_mla", "tree_mtp"])
def test_a_shipped_file_is_valid_for_its_pydantic_models(llm_args: Any, name: str) -> None:
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    args = llm_args.TorchLlmArgs(model="m", **content)
    ours = config.load_config(CONFIGS / f"{name}.yaml")
    assert plain_config(args.speculative_config) == ours.speculative
    assert args.env_overrides == ours.env_overrides
    assert args.kv_cache_config.dtype == ours.engine.kv_cache_dtype
    assert args.kv_cache_config.tokens_per_block == ours.engine.tokens_per_block


def test_a_tree_of_mtp_layers_is_refused_with_what_they_lack_and_one_of_a_head_is_not(
    llm_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(import_module("tensorrt_llm._torch.distributed.ops"), "allgather")
    with pytest.raises(trtllm_tree.UnsupportedError, match=r"allgather.*draft trees from MTP layers"):
        trtllm_tree.SpeculativeConfig(decoding_type="MTP", tree_topk=2)
    assert config_of(tree_topk=2).tree_topk == 2
    chain = trtllm_tree.SpeculativeConfig(decoding_type="MTP", tree_topk=1)
    assert type(chain) is llm_args.MTPDecodingConfig


def test_a_target_without_an_mtp_layer_is_refused_by_the_embedded_host(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="has no MTP layer to draft with"):
        LLM(str(tiny_target), speculative_config=config.SpeculativeConfig(decoding_type="MTP"))
