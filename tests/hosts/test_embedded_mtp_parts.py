"""The parts of MTP drafting on the embedded host: its caches, leaves, positions, features, dtypes and graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.embedded_engine import Build, Sizes, Truths, greedy, prompts_of
from tests.mtp_models import NUM_LAYERS, drop_tensors, tiny_mtp_dir
from tests.oracles.known_continuation import RoundLog
from tests.oracles.mtp_loop import SlowMtp
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.errors import ConfigError
from trtllm_tree.hosts.embedded import attention, host
from trtllm_tree.hosts.embedded.mtp_layer import MtpSide

CHAIN: Sizes = (1, 3, 4)
TREE: Sizes = (4, 3, 12)


def test_a_row_of_position_i_rotates_by_i(
    make_mtp: Build, mtp_target: Path, mtp_truths: Truths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores do not tell if every row is off by one; keys that others wrote at their positions would."""
    llm = make_mtp(mtp_target, TREE, max_num_tokens=13)
    side = llm.engine.hook._draft_model._side
    positions: list[list[int]] = []
    rotary = side._rotary

    def spied(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        positions.append(position_ids.flatten().tolist())
        return rotary(x, position_ids)

    monkeypatch.setattr(side, "_rotary", spied)
    prompt = prompts_of(mtp_truths)[4]
    assert len(prompt) == 17
    llm.generate(prompt, greedy(2))
    prompt_rows, lanes = positions[:2], positions[2:4]
    assert prompt_rows == [list(range(13)), list(range(13, 17))]
    # The root's row is a prompt's last one, so the first lanes stand at its successor's position.
    assert lanes == [[17] * 4, [18] * 4]


def test_our_kernel_drafts_over_either_cache_what_torch_drafts(
    make_mtp: Build, mtp_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `triton` leaf under a decode step: on a GPU, else interpreted. In sizes that it serves."""
    sizes = {"head_dim": 64} if mtp_kind == "glm4_moe" else {}
    target_dir = tiny_mtp_dir(tmp_path, mtp_kind, agrees=True, **sizes)
    prompt, logs = list(range(40, 61)), []
    for leaf in ("torch", "triton"):
        if leaf == "triton":
            monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
            monkeypatch.setattr(
                attention, "default_leaf", lambda device, shape: TritonLeaf(torch.device(device), shape)
            )
        llm = make_mtp(target_dir, (2, 3, 6), tokens_per_block=32)
        leaves = {llm.engine.hook._cascade.leaf.name, llm.engine.hook._draft_model._cascade.leaf.name}
        assert leaves == {"triton"} or leaf == "torch"
        log = RoundLog(llm)
        tokens = llm.generate(prompt, greedy(6)).outputs[0].token_ids
        logs.append((tokens, [(drafted, parents) for _, drafted, parents, _ in log.drafted]))
    assert logs[0] == logs[1]


def test_the_draft_layer_caches_rows_like_the_targets_layers(
    make_mtp: Build, mtp_target: Path, mtp_kind: str
) -> None:
    target_group, draft_group = make_mtp(mtp_target, TREE, tokens_per_block=16).engine.cache.groups
    shape = (2, 2, 16, 32) if mtp_kind == "glm4_moe" else (1, 16, 32 + 8)
    assert {pool.shape[1:] for pool in target_group.pools.values()} == {shape}
    assert len(target_group.pools) == NUM_LAYERS
    assert {name: pool.shape[1:] for name, pool in draft_group.pools.items()} == {"draft.0": shape}


def test_leaves_of_both_sides_know_their_caches(make_mtp: Build, mtp_target: Path, mtp_kind: str) -> None:
    hook = make_mtp(mtp_target, TREE).engine.hook
    for cascade in (hook._cascade, hook._draft_model._cascade):
        assert cascade.leaf._shape.value_dim == (32 if mtp_kind == "deepseek_v3" else None)
        assert cascade.leaf._shape.num_heads == 4


def test_features_are_the_targets_rows_behind_its_final_norm_whichever_logits_are_wanted(
    make_mtp: Build, mtp_target: Path, mtp_truths: Truths
) -> None:
    llm = make_mtp(mtp_target, TREE)
    prompt = prompts_of(mtp_truths)[5]
    llm.engine.add_request(prompt, greedy(4))
    llm.engine.step()
    features = llm.engine.hook._features
    assert features.shape[1] == 64
    expected = SlowMtp(mtp_target, 1).target_rows(prompt)
    torch.testing.assert_close(features[: len(prompt)].cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_layer_scores_in_float32(tmp_path: Path, mtp_kind: str, dtype: torch.dtype) -> None:
    target_dir = tiny_mtp_dir(tmp_path, mtp_kind, dtype=torch.bfloat16)
    runner = ModelRunner(target_dir, dtype=dtype, device=torch.device("cpu"))
    side = MtpSide(runner)
    assert side._layer.eh_proj.weight.dtype == side.dtype == dtype
    logits = side.logits(torch.ones(2, 64, dtype=dtype))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], runner.model.lm_head.weight.float().sum(1))


@pytest.mark.parametrize("sizes", [CHAIN, TREE], ids=str)
def test_in_16_bits_most_drafts_are_those_of_float32(
    make_mtp: Build, mtp_agreeing: Path, mtp_agreed: Truths, sizes: Sizes
) -> None:
    prompts, first = prompts_of(mtp_agreed), []
    for dtype in ("float32", "bfloat16"):
        llm = make_mtp(mtp_agreeing, sizes, dtype=dtype, device="cpu")
        log = RoundLog(llm)
        llm.generate(prompts, greedy(2))
        first.append([set(tokens) for _, batch, _, _ in log.drafted for tokens in batch][: len(prompts)])
    shared = [len(a & b) / len(a) for a, b in zip(*first, strict=True)]
    assert sum(shared) / len(shared) > 0.7


@pytest.mark.parametrize(
    ("implementation", "dtype", "expected"),
    [
        ("grouped_mm", torch.bfloat16, True),
        ("grouped_mm", torch.float32, False),
        ("batched_mm", torch.float32, True),
        ("eager", torch.bfloat16, False),
    ],
)
def test_a_step_is_replayed_only_if_the_layers_experts_can_be(
    make_mtp: Build,
    mtp_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    implementation: str,
    dtype: torch.dtype,
    expected: bool,
) -> None:
    runner = ModelRunner(mtp_target, dtype=dtype, device=torch.device("cpu"))
    runner.config._experts_implementation = implementation
    side = MtpSide(runner)
    assert side.graph_safe == runner.is_capturable == expected
    draft_model = make_mtp(mtp_target, CHAIN).engine.hook._draft_model
    monkeypatch.setattr(draft_model, "_decode_attention", _Safe())
    monkeypatch.setattr(draft_model, "_side", side)
    assert draft_model.graph_safe == expected


@pytest.mark.parametrize("dense", [True, False])
def test_experts_that_keep_a_step_from_being_captured_are_named(
    mtp_kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dense: bool,
) -> None:
    """Those of the target, or of the MTP layer alone."""
    resolve = host.resolve_config
    monkeypatch.setattr(
        host, "resolve_config", lambda *args, **kwargs: replace(resolve(*args, **kwargs), cuda_graphs=True)
    )
    monkeypatch.setattr("trtllm_tree.engine.engine.DecodeGraphs", lambda step, *args, **kwargs: step)
    target_dir = tiny_mtp_dir(tmp_path, mtp_kind, first_k_dense_replace=NUM_LAYERS if dense else 1)
    name = {"glm4_moe": "Glm4MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[mtp_kind]
    spec = SpeculativeConfig(decoding_type="MTP", tree_topk=2, num_steps=2)
    for dtype, warned in (("float32", True), ("bfloat16", False)):
        caplog.clear()
        config = EngineConfig(model=str(target_dir), device="cpu", dtype=dtype, max_seq_len=64)
        host.build_host(config, spec, target_dir=target_dir, head_dir=None)
        said = [record.getMessage() for record in caplog.records if record.name == host.__name__]
        owner = f"the MTP layer of {name}" if dense else name
        start = f"cuda_graphs: the experts of {owner} in float32 wait for the device"
        assert [text.startswith(start) for text in said] == [True] * warned


def test_weights_that_transformers_does_not_take_are_one_problem(tmp_path: Path, mtp_kind: str) -> None:
    """The headers are searched before; this is what they did not show."""
    target_dir = tiny_mtp_dir(tmp_path, mtp_kind)
    drop_tensors(target_dir, "layers.3.mlp.experts.5.up_proj.weight")
    runner = ModelRunner(target_dir, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        MtpSide(runner)
    (problem,) = caught.value.problems
    assert (problem.option, problem.value) == ("model: MTP layer", str(target_dir))
    assert problem.rule.startswith("the MTP layer cannot be loaded (") and "\n" not in problem.rule


class _Safe:
    graph_safe = True
