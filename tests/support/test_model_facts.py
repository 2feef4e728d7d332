"""Facts read from a bare config.json agree with what transformers makes of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from trtllm_tree.support.model_facts import ModelFacts, model_facts, read_model_facts

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def facts_of(config: Any) -> ModelFacts:
    """By way of the JSON that `save_pretrained` writes."""
    return model_facts(json.loads(config.to_json_string()))


def test_grouped_heads() -> None:
    facts = facts_of(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, dtype="bfloat16"))
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.value_dim) == (4, 2, 16, None)
    assert (facts.head_ratio, facts.dtype, facts.model_type) == (2, "bfloat16", "llama")
    assert facts.layer_kinds == ("full_attention",) and facts.sliding_window is None and not facts.sinks


def test_keys_that_are_missing_are_unknown_and_mha_has_as_many_kv_heads() -> None:
    facts = model_facts({"hidden_size": 576})
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_ratio) == (None,) * 4
    assert model_facts({"num_attention_heads": 8, "hidden_size": 512}).num_kv_heads == 8
    assert model_facts({"torch_dtype": "float16"}).dtype == "float16"


def test_a_latent_cache_has_one_head_of_latent_and_rotary_channels() -> None:
    config = transformers.DeepseekV3Config(**SIZES, kv_lora_rank=32, qk_rope_head_dim=8)
    facts = facts_of(config)
    assert (facts.num_kv_heads, facts.head_dim, facts.value_dim) == (1, 40, 32)


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    facts = model_facts(
        {"model_type": "gemma3", "num_attention_heads": 99, "text_config": {"num_attention_heads": 8}}
    )
    assert (facts.num_heads, facts.model_type) == (8, "gemma3")


def test_sliding_layers_sinks_and_caps() -> None:
    gemma = facts_of(transformers.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 6}, sliding_window=9))
    assert gemma.layer_kinds == ("full_attention", "sliding_attention") and gemma.sliding_window is not None
    oss = facts_of(transformers.GptOssConfig(**SIZES, sliding_window=8))
    assert (oss.sliding_window, oss.sinks) == (8, True)
    assert facts_of(transformers.Gemma2Config(**SIZES)).unknown_options == (("attn_logit_softcapping", 50.0),)
    mistral = facts_of(transformers.MistralConfig(**SIZES, sliding_window=16))
    assert (mistral.sliding_window, mistral.layer_kinds) == (16, ("sliding_attention",))


@pytest.mark.parametrize("used", [False, True])
def test_a_window_that_is_switched_off_is_none(used: bool) -> None:
    old = {"sliding_window": 4096, "use_sliding_window": used}
    assert model_facts(old).sliding_window == (4096 if used else None)


def test_recurrent_layers_are_found_under_all_their_names() -> None:
    hybrid = transformers.Qwen3NextConfig(**SIZES | {"num_hidden_layers": 4})
    for facts in (
        facts_of(hybrid),
        facts_of(transformers.Mamba2Config(num_hidden_layers=2)),
        model_facts({"layers_block_type": ["mamba", "attention", "moe"]}),
        model_facts({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"}),
    ):
        assert facts.has_recurrent_layers and facts.other_kinds == ()


def test_other_layers_and_history_inputs_are_named() -> None:
    assert model_facts({"layer_types": ["chunked_attention", "full_attention"]}).other_kinds == (
        "chunked_attention",
    )
    assert model_facts({"engram_layers": [2], "ngram_size": 0}).history_keys == ("engram_layers",)


def test_quantised_weights_are_named() -> None:
    assert model_facts({"quantization_config": {"quant_method": "fp8"}}).quantization == "fp8"
    assert model_facts({}).quantization is None


@pytest.mark.parametrize("name", ["Glm4MoeConfig", "DeepseekV3Config", "NemotronHConfig", "LlamaConfig"])
def test_mtp_layers_that_are_not_written_are_counted_as_transformers_counts_them(name: str) -> None:
    config = getattr(transformers, name)()
    written = json.loads(config.to_json_string())
    counted = model_facts(written).num_mtp_layers
    bare = {"model_type": config.model_type}
    assert model_facts(bare).num_mtp_layers == counted
    assert counted == (1 if name in ("Glm4MoeConfig", "DeepseekV3Config") else 0)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        for value in (None, 0):
            assert model_facts(bare | {key: value}).num_mtp_layers == 0
        assert model_facts(bare | {key: 2}).num_mtp_layers == 2


def test_a_directory_without_a_readable_config_has_no_facts(tmp_path: Path) -> None:
    assert read_model_facts(tmp_path) is None
    (tmp_path / "config.json").write_text("[1]")
    assert read_model_facts(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    facts = read_model_facts(tmp_path)
    assert facts is not None and facts.num_heads == 4
