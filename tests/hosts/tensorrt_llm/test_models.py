"""Our target models: registered in the place of TensorRT-LLM's, inert until trees are on, and loud if they cannot."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.tensorrt_llm.install import runtime_double
from tests.hosts.tensorrt_llm.hybrid_runs import hybrid_mtp_dir
from tests.hosts.tensorrt_llm.mtp_runs import glm_dir
from tests.hosts.tensorrt_llm.tree_runs import agreeing_pair, prompts_of, tree_double, tree_executor
from trtllm_tree.errors import ConfigError, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm import plugin

Pair = tuple[Path, Path]
ARCHITECTURES = ("Llama", "Qwen3", "Qwen3Moe", "DeepseekV3", "GptOss", "NemotronH", "Glm4Moe")
OWN_MODULES = {"NemotronH": "nemotron", "Glm4Moe": "glm"}
MODELS = "trtllm_tree.hosts.tensorrt_llm.models"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(params=["new", "old"])
def double(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tree_double(tmp_path / "double", request.param, monkeypatch):
        yield request.param


def double_module(name: str) -> Any:
    return importlib.import_module(f"tensorrt_llm._double.{name}")


def config(pair: Pair, **options: Any) -> Any:
    tree = {"max_total_draft_tokens": 11, "use_dynamic_tree": True, "dynamic_tree_max_topK": 3}
    return double_module("llm_args").Eagle3DecodingConfig(
        max_draft_len=4, speculative_model=str(pair[1]), eagle3_layers_to_capture={0, 1, 2}, **tree | options
    )


def model_config(pair: Pair, spec_config: Any, **options: Any) -> Any:
    from transformers import AutoConfig

    pretrained = AutoConfig.from_pretrained(pair[0], local_files_only=True)
    make = double_module("model_parts").ModelConfig
    return make(pretrained, spec_config=spec_config, torch_dtype=torch.float32, **options)


def test_every_architecture_is_ours_and_found_by_its_name(double: str) -> None:
    models, mapping = importlib.import_module(MODELS), double_module("model_parts").MODEL_CLASS_MAPPING
    for name in ARCHITECTURES:
        model = mapping[f"{name}ForCausalLM"]
        assert model is getattr(models, f"Tree{name}ForCausalLM")
        # Ranks import it by this name, or unpickle it.
        assert model.__module__ == MODELS and pickle.loads(pickle.dumps(model)) is model
        module = double_module(OWN_MODULES.get(name, "models"))
        assert issubclass(model, getattr(module, f"{name}ForCausalLM"))


def test_the_worker_takes_the_built_in_ones_place_everywhere(double: str, pair: Pair, capfd: Any) -> None:
    executor = tree_executor(*pair)
    model, worker = executor.model, executor.model.spec_worker
    built_in = importlib.import_module("tensorrt_llm._torch.speculative.eagle3").Eagle3OneModelWorker
    assert isinstance(worker, built_in)
    assert [module for module in model.epilogue if isinstance(module, built_in)] == [worker]
    assert [module for module in model.modules() if isinstance(module, built_in)] == [worker]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    head = [name for name in names if "midlayer" in name]
    assert head and all(name.startswith("draft_model.") for name in head), (
        "the head is the worker's child as well"
    )
    lines = [line for line in capfd.readouterr().err.splitlines() if "rank 0" in line]
    assert len(lines) == 1
    assert "TreeEagleWorker" in lines[0] and "TreeCascadeFmha" in lines[0] and "verify gumbel" in lines[0]


@pytest.mark.parametrize(
    "variables", [{}, {"TLLM_TREE_ENABLE": "0"}, {"TLLM_TREE_ENABLE": "1", "TLLM_TREE_DISABLE": "1"}]
)
def test_without_trees_the_models_are_the_built_in_ones(
    double: str, pair: Pair, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("TLLM_TREE_ENABLE")
    monkeypatch.delenv("TLLM_FMHA_LIBS")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = importlib.import_module(MODELS).TreeLlamaForCausalLM(model_config(pair, config(pair)))
    assert type(model.spec_worker).__name__ == "Eagle3OneModelDynamicTreeWorker"
    assert "trtllm_tree" not in double_module("registry").FMHA_LIBS
    libraries = [library.__name__ for library in double_module("registry").get_enabled_fmha_lib_classes()]
    assert "TreeCascadeFmha" not in libraries


def test_with_trees_on_a_chain_is_the_built_in_ones(double: str, pair: Pair) -> None:
    chain = {"max_total_draft_tokens": None, "use_dynamic_tree": False, "dynamic_tree_max_topK": None}
    executor = double_module("executor").Executor(
        pair[0], speculative_config=config(pair, **chain), dtype=torch.float32
    )
    executor.warmup()
    assert type(executor.model.spec_worker).__name__ == "Eagle3OneModelWorker"
    assert not hasattr(executor.model.spec_worker, "open_window")
    prompts = prompts_of(7, 20)
    plain = double_module("executor").Executor(pair[0], dtype=torch.float32)
    assert plain.model.spec_worker is None
    assert executor.generate(prompts, max_tokens=12) == plain.generate(prompts, max_tokens=12)


def test_everything_that_stands_in_the_way_is_in_one_report_before_anything_is_built(
    double: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    base = double_module("models").LlamaForCausalLM
    monkeypatch.setattr(base, "__init__", lambda self, *args: built.append(args))
    # A renamed symbol, an option that trees cannot have, and a wrong word of ours.
    monkeypatch.delattr(double_module("spec_tree").DynamicTreeSlotStorage, "fill_all_slot_ids")
    monkeypatch.setenv("TLLM_TREE_VERIFY", "typical")
    mapping = double_module("model_parts").Mapping(pp_size=2)
    with pytest.raises(UnsupportedError) as caught:
        importlib.import_module(MODELS).TreeLlamaForCausalLM(
            model_config(pair, config(pair), mapping=mapping)
        )
    text = str(caught.value)
    for needed in ("DynamicTreeSlotStorage.fill_all_slot_ids", "pipeline_parallel_size", "TLLM_TREE_VERIFY"):
        assert needed in text
    assert not built


def test_layers_that_our_attention_cannot_serve_are_named(
    double: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, inner = double_module("models").LlamaForCausalLM, None

    def init(self: Any, model_config: Any) -> None:
        inner(self, model_config)
        self.model.layers[1].self_attn.attn.attention_chunk_size = 64

    inner = base.__init__
    monkeypatch.setattr(base, "__init__", init)
    with pytest.raises(UnsupportedError, match=r"layer.*1"):
        importlib.import_module(MODELS).TreeLlamaForCausalLM(model_config(pair, config(pair)))


def test_sizes_of_a_tree_that_is_none_are_refused(double: str, pair: Pair) -> None:
    wrong = config(pair)
    wrong.max_total_draft_tokens = 200
    with pytest.raises((UnsupportedError, ConfigError), match="max_total_draft_tokens"):
        importlib.import_module(MODELS).TreeLlamaForCausalLM(model_config(pair, wrong))


def test_an_architecture_that_is_missing_keeps_no_other_from_being_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_TREE_ENABLE", "1")
    with runtime_double(tmp_path / "double", "new"):
        sys.modules.pop(MODELS, None)
        monkeypatch.setitem(sys.modules, "tensorrt_llm._torch.models.modeling_qwen3", None)
        gpt_oss = importlib.import_module("tensorrt_llm._torch.models.modeling_gpt_oss")
        # One that owns no worker is not ours either.
        monkeypatch.setattr(gpt_oss, "GptOssForCausalLM", type("GptOssForCausalLM", (), {}))
        plugin.register(required=True)
        models = importlib.import_module(MODELS)
        found = [name for name in ARCHITECTURES if hasattr(models, f"Tree{name}ForCausalLM")]
        assert found == ["Llama", "Qwen3Moe", "DeepseekV3", "NemotronH", "Glm4Moe"]
    sys.modules.pop(MODELS, None)


@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glm_dir(tmp_path_factory.mktemp("glm"))


@pytest.mark.parametrize("make", [glm_dir, hybrid_mtp_dir])
def test_the_worker_of_an_mtp_layer_takes_the_built_in_ones_place_everywhere(
    double: str, tmp_path: Path, capfd: Any, make: Any
) -> None:
    model = tree_executor(make(tmp_path), None).model
    worker = double_module("mtp_worker").MTPEagleWorker
    assert isinstance(model.spec_worker, worker)
    assert {id(module) for module in model.epilogue if isinstance(module, worker)} == {id(model.spec_worker)}
    assert [module for module in model.modules() if isinstance(module, worker)] == [model.spec_worker]
    assert not list(model.spec_worker.named_parameters()), "the layer is the worker's child as well"
    assert "worker TreeMTPEagleWorker, attention TreeCascadeFmha" in capfd.readouterr().err


def mtp_config(**options: Any) -> Any:
    tree = {"max_total_draft_tokens": 11, "use_dynamic_tree": True, "dynamic_tree_max_topK": 3}
    return double_module("llm_args").MTPDecodingConfig(max_draft_len=4, **tree | options)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("speculative.mtp_dynamic_tree", "MTPEagleDynamicTreeResourceManager"),
        ("models.modeling_speculative", "MTPForCausalLM"),
        ("models.modeling_deepseekv3", "DeepseekV3MTPHead"),
        ("distributed.ops", "allgather"),
    ],
)
def test_what_mtp_layers_need_is_missed_by_their_trees_alone(
    double: str, pair: Pair, mtp_target: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.delattr(importlib.import_module(f"tensorrt_llm._torch.{module}"), name)
    # Something that every tree needs besides, and an option that none can have.
    monkeypatch.delattr(double_module("spec_tree").DynamicTreeSlotStorage, "fill_all_slot_ids")
    mapping = double_module("model_parts").Mapping(pp_size=2)
    target = (mtp_target, mtp_target)
    with pytest.raises(UnsupportedError) as caught:
        importlib.import_module(MODELS).TreeGlm4MoeForCausalLM(
            model_config(target, mtp_config(), mapping=mapping)
        )
    text = str(caught.value)
    for needed in (name, "draft trees from MTP layers", "fill_all_slot_ids", "pipeline_parallel_size"):
        assert needed in text
    with pytest.raises(UnsupportedError) as caught:
        importlib.import_module(MODELS).TreeLlamaForCausalLM(model_config(pair, config(pair)))
    assert "fill_all_slot_ids" in str(caught.value) and name not in str(caught.value)


def test_a_tree_needs_the_mtp_layer_of_its_own_architecture_only(
    double: str, mtp_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = (mtp_target, mtp_target)
    with monkeypatch.context() as patch:
        patch.delattr(
            importlib.import_module("tensorrt_llm._torch.models.modeling_nemotron_h"), "NemotronHMTP"
        )
        importlib.import_module(MODELS).TreeGlm4MoeForCausalLM(model_config(target, mtp_config()))
    monkeypatch.delattr(importlib.import_module("tensorrt_llm._torch.models.modeling_glm"), "Glm4MTP")
    with pytest.raises(UnsupportedError, match=r"Glm4MTP.forward is missing|Glm4MTP is missing"):
        importlib.import_module(MODELS).TreeGlm4MoeForCausalLM(model_config(target, mtp_config()))


def test_an_mtp_chain_is_the_built_in_ones(double: str, mtp_target: Path) -> None:
    chain = {"max_total_draft_tokens": None, "use_dynamic_tree": False, "dynamic_tree_max_topK": None}
    model = importlib.import_module(MODELS).TreeGlm4MoeForCausalLM(
        model_config((mtp_target, mtp_target), mtp_config(**chain))
    )
    assert type(model.spec_worker) is double_module("mtp_worker").MTPEagleWorker


def test_a_latent_mtp_layer_is_refused_by_name(double: str, tmp_path: Path) -> None:
    from tests.builders import tiny_deepseek_dir

    target = tiny_deepseek_dir(tmp_path)
    found = model_config((target, target), mtp_config())
    found.pretrained_config.num_nextn_predict_layers = 1
    with pytest.raises(UnsupportedError, match=r"drafts with the MTP layers of glm4_moe.*not of deepseek_v3"):
        importlib.import_module(MODELS).TreeDeepseekV3ForCausalLM(found)
