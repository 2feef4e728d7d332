"""Targets whose layers slide or have attention sinks: transformers' own tokens, plain, as chains and as trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_eagle3_dir, tiny_sliding_dir
from tests.hosts.embedded_engine import CHAIN, MAIN, Sizes, Truths, greedy, poison_pools, prompts_of
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, SpeculativeConfig, UnsupportedError
from trtllm_tree.engine.layer_options import LayerOptions, layer_options
from trtllm_tree.engine.model_runner import load_model_config, target_layer_specs

PROMPT_LENGTHS = (1, 4, 6, 7, 15, 17, 40)
NUM_TOKENS = 40
# The kinds of models, and what their layers ask for.
KINDS = ("gemma3", "gpt_oss", "mistral")


@pytest.fixture(scope="module", params=KINDS)
def target_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sliding_dir(tmp_path_factory.mktemp("sliding"), request.param)


@pytest.fixture(scope="module")
def truths(target_dir: Path) -> Truths:
    """Prompts around the windows' lengths, and what transformers' eager attention says to them."""
    model: Any = AutoModelForCausalLM.from_pretrained(target_dir, attn_implementation="eager")
    generator = torch.Generator().manual_seed(11)
    found = {}
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(3, 300, (1, length), generator=generator)
        tokens = prompt
        # Without a cache, so that only the mask says what a row sees.
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = model(tokens, use_cache=False).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        found[tuple(prompt[0].tolist())] = tokens[0, length:].tolist()
    return found


@pytest.fixture
def build(target_dir: Path, tmp_path: Path, device: str) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM, with speculation if sizes are given."""
    options = {"device": device, "dtype": "float32", "max_seq_len": 128, "cuda_graphs": False}

    def make(sizes: Sizes | None = None, **more: Any) -> LLM:
        config = None
        if sizes is not None:
            topk, steps, nodes = sizes
            head = tiny_eagle3_dir(tmp_path, target_dir)
            config = SpeculativeConfig(
                tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=str(head)
            )
        return LLM(str(target_dir), speculative_config=config, **options | {"tokens_per_block": 16} | more)

    yield make


def tokens(llm: LLM, truths: Truths) -> list[list[int]]:
    outputs = llm.generate(prompts_of(truths), greedy(NUM_TOKENS))
    return [output.outputs[0].token_ids for output in outputs]


def test_the_window_and_the_sinks_matter_to_these_models(target_dir: Path, truths: Truths) -> None:
    """Without them the same weights say something else, so that what is tested below can fail."""
    model: Any = AutoModelForCausalLM.from_pretrained(target_dir, attn_implementation="eager")
    config = model.config
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.constant_(module.sinks, -torch.inf)
    prompt, continuation = list(truths.items())[-1]
    sequence = torch.tensor([[*prompt, *continuation]])
    with torch.inference_mode():
        if hasattr(model.model.layers[0].self_attn, "sinks"):
            without_sinks = model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert without_sinks.tolist() != continuation
        config.sliding_window = 10_000
        unbounded = model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert unbounded.tolist() != continuation


@pytest.mark.parametrize("max_num_tokens", [512, 13])
def test_plain_decoding_says_what_transformers_says(
    build: Callable[..., LLM], truths: Truths, max_num_tokens: int
) -> None:
    llm = build(max_num_tokens=max_num_tokens)
    poison_pools(llm.engine)
    assert tokens(llm, truths) == list(truths.values())


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("sizes", [CHAIN, MAIN, (3, 4, 20), (5, 10, 70)], ids=str)
def test_chains_and_trees_give_the_same_tokens(
    build: Callable[..., LLM],
    truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    page_size: int,
) -> None:
    # Windows of 5 to 10 positions: deep nodes see no prefix, and not their whole path either.
    llm = build(sizes, tokens_per_block=page_size, max_num_tokens=64)
    KnownContinuation(llm, truths, monkeypatch)
    log = RoundLog(llm)
    poison_pools(llm.engine)
    assert tokens(llm, truths) == list(truths.values())
    assert max(log.accept_lens) >= 5
    assert log.has_moved_rows == (sizes[0] > 1)


def test_the_startup_says_which_leaf_serves_and_why(
    build: Callable[..., LLM], target_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        build()
    chosen = [record.message for record in caplog.records if "tree attention" in record.message]
    assert len(chosen) == 1
    assert chosen[0].endswith("leaf reference")
    assert "serves no sliding window" in chosen[0]
    assert ("serves no attention sinks" in chosen[0]) == (target_dir.name == "gpt_oss")


def test_options_of_layers_follow_the_config(tmp_path: Path) -> None:
    windows = {}
    for kind in KINDS:
        options = layer_options(load_model_config(tiny_sliding_dir(tmp_path, kind)))
        assert {each.sinks for each in options} == {kind == "gpt_oss"}
        windows[kind] = [each.sliding_window for each in options]
    assert windows == {"gemma3": [7, None, 7, 7], "gpt_oss": [5, None, 5, 5], "mistral": [10] * 4}


def test_a_window_that_is_switched_off_or_absent_is_none(tiny_target: Path) -> None:
    config = load_model_config(tiny_target)
    assert layer_options(config) == [LayerOptions(None, sinks=False)] * 4
    config.sliding_window, config.use_sliding_window = 8, False
    assert layer_options(config) == [LayerOptions(None, sinks=False)] * 4
    config.use_sliding_window = True
    assert layer_options(config) == [LayerOptions(8, sinks=False)] * 4


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, ["layer_types"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["sliding_window"]),
        ({"sliding_window": 8, "model_type": "phimoe"}, ["sliding_window"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"logits_scaling": 8.0, "lm_head_multiplier": 0.5}, ["logits_scaling", "lm_head_multiplier"]),
        ({"logits_scaling": 1, "logit_scale": None, "sliding_window": 8}, []),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tiny_target: Path, changes: dict[str, object], options: list[str]
) -> None:
    config = load_model_config(tiny_target)
    for name, value in changes.items():
        # Some of these are no fields of a Llama config, and model_type is one of the class.
        object.__setattr__(config, name, value)
    if not options:
        assert target_layer_specs(config)
        return
    with pytest.raises(UnsupportedError) as caught:
        target_layer_specs(config)
    assert [problem.option for problem in caught.value.problems] == [f"model: {name}" for name in options]


def test_a_layer_that_calls_unlike_its_config_is_refused(
    build: Callable[..., LLM], target_dir: Path, truths: Truths
) -> None:
    llm = build()
    module: Any = llm.engine.runner.model.model.layers[2].self_attn
    if target_dir.name == "mistral":
        module.config.sliding_window = 3
    else:
        module.sliding_window = None
    with pytest.raises(UnsupportedError, match=r"layer \d: sliding_window"):
        tokens(llm, truths)
