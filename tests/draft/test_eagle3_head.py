"""Eagle3Head against a forward pass in float64 written from the maths, with its own RoPE and attention."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from tests.builders import tiny_eagle3_dir, tiny_llama_dir
from trtllm_tree.draft.eagle3_head import Eagle3Head, load_eagle3_head
from trtllm_tree.errors import ConfigError

HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("models"))


def _target_embedding(target_dir: Path, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    weights = load_file(target_dir / "model.safetensors")
    return nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"].to(dtype))


def _load(head_dir: Path, target_dir: Path, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    return load_eagle3_head(
        head_dir,
        target_config=AutoConfig.from_pretrained(target_dir),
        embed_tokens=_target_embedding(target_dir, dtype),
        dtype=dtype,
        device="cpu",
    )


class DenseHost:
    """What a host does in `attend`: keep K and V; row i sees the keys that `visible` [T, keys] marks."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.visible = torch.zeros(0, 0, dtype=torch.bool)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        groups = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, keys).float() * scale
        scores = scores.masked_fill(~self.visible, -math.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1).to(q.dtype), values)


class Oracle:
    """The head in float64, one row at a time, straight from the checkpoint's tensors."""

    def __init__(self, head_dir: Path, embedding: Tensor, *, position_scale: float = 1.0) -> None:
        weights = load_file(head_dir / "model.safetensors")
        self.w = {name: weight.double() for name, weight in weights.items() if weight.is_floating_point()}
        self.embedding = embedding.double()
        self.position_scale = position_scale
        self.cache: list[tuple[Tensor, Tensor]] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        half = heads.shape[1] // 2
        angles = position * self.position_scale * 10000.0 ** (-torch.arange(half).double() / half)
        turned = torch.complex(heads[:, :half], heads[:, half:]) * torch.exp(1j * angles)
        return torch.cat((turned.real, turned.imag), 1)

    def row(self, token: int, hidden: Tensor, position: int, visible: list[int]) -> Tensor:
        """Append this row's K and V, attend to the cache entries `visible`, and return the pre-norm row."""
        x = torch.cat(
            (
                self.norm(self.embedding[token], "midlayer.input_layernorm"),
                self.norm(hidden, "midlayer.hidden_norm"),
            )
        )
        q, k, v = (self.w[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        q, k = self.rotate(q.view(HEADS, -1), position), self.rotate(k.view(KV_HEADS, -1), position)
        self.cache.append((k, v.view(KV_HEADS, -1)))
        outputs = []
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            keys = torch.stack([self.cache[i][0][kv_head] for i in visible])
            values = torch.stack([self.cache[i][1][kv_head] for i in visible])
            outputs.append(((keys @ q[head]) / math.sqrt(q.shape[1])).softmax(0) @ values)
        hidden = hidden + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(outputs)
        y = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (self.w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = gate @ y
        return hidden + down @ (gated / (1 + torch.exp(-gated)) * (up @ y))

    def logits(self, prenorm: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ self.norm(prenorm, "norm")


def _two_steps_agree(head: Eagle3Head, oracle: Oracle, *, rtol: float) -> None:
    """A causal first step over 7 positions, then three sibling lanes that continue from the last row."""
    generator = torch.Generator().manual_seed(5)
    num_rows, start, num_lanes = 7, 11, 3
    features = torch.randn(num_rows, 3 * head.hidden_size, generator=generator) * 3
    tokens = torch.randint(0, 300, (num_rows + num_lanes,), generator=generator, dtype=torch.int32)
    positions = torch.arange(start, start + num_rows, dtype=torch.int32)
    dtype = head.fc.weight.dtype

    host = DenseHost()
    host.visible = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    lane_sees = torch.cat((torch.ones(num_lanes, num_rows), torch.eye(num_lanes)), 1).bool()
    with torch.inference_mode():
        fused = head.fuse(features.to(dtype))
        first = head(tokens[:num_rows], fused, positions, host)
        host.visible = lane_sees
        last = first[-1:].expand(num_lanes, -1)
        lane_positions = torch.full((num_lanes,), start + num_rows)
        second = head(tokens[num_rows:], last, lane_positions, host)
        logits = head.logits(second)

    fused_truth = features.to(dtype).double() @ oracle.w["fc.weight"].T
    first_truth = [
        oracle.row(int(tokens[i]), fused_truth[i], start + i, list(range(i + 1))) for i in range(num_rows)
    ]
    second_truth = [
        oracle.row(
            int(tokens[num_rows + i]), first_truth[-1], start + num_rows, [*range(num_rows), num_rows + i]
        )
        for i in range(num_lanes)
    ]
    logits_truth = torch.stack([oracle.logits(row) for row in second_truth])
    for got, truth in (
        (fused, fused_truth),
        (first, torch.stack(first_truth)),
        (second, torch.stack(second_truth)),
        (logits, logits_truth),
    ):
        assert got.shape == truth.shape and got.dtype == dtype
        assert (got.double() - truth).norm() <= rtol * truth.norm()


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_two_steps_match_a_float64_forward(
    tmp_path: Path, target_dir: Path, head_dim: int, own_embedding: bool
) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, head_dim=head_dim, own_embedding=own_embedding)
    head = _load(head_dir, target_dir)
    embedding = _target_embedding(target_dir).weight
    if own_embedding:
        embedding = load_file(head_dir / "model.safetensors")["embed_tokens.weight"]
    _two_steps_agree(head, Oracle(head_dir, embedding), rtol=2e-6)


def test_bfloat16_weights_keep_float32_rotary_frequencies(tmp_path: Path, target_dir: Path) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, dtype=torch.bfloat16)
    head = _load(head_dir, target_dir, torch.bfloat16)
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    frequencies = 10000.0 ** (-torch.arange(8).double() / 8)
    torch.testing.assert_close(head.rotary.inv_freq.double(), frequencies, rtol=1e-6, atol=0)
    embedding = _target_embedding(target_dir, torch.bfloat16).weight
    _two_steps_agree(head, Oracle(head_dir, embedding), rtol=0.03)


def test_rope_scaling_of_the_heads_config_is_applied(tmp_path: Path, target_dir: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, config_overrides=scaling)
    oracle = Oracle(head_dir, _target_embedding(target_dir).weight, position_scale=0.25)
    _two_steps_agree(_load(head_dir, target_dir), oracle, rtol=2e-6)


def test_a_float32_head_takes_a_bfloat16_targets_features_and_embedding(
    tmp_path: Path, target_dir: Path
) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir)
    embedding = _target_embedding(target_dir, torch.bfloat16)
    config = AutoConfig.from_pretrained(target_dir)
    head = load_eagle3_head(
        head_dir, target_config=config, embed_tokens=embedding, dtype=torch.float32, device="cpu"
    )
    features = torch.ones(1, 192, dtype=torch.bfloat16)
    hidden = head.fuse(features)
    row = head(torch.tensor([7]), hidden, torch.tensor([0]), lambda q, k, v, scale: v.repeat_interleave(2, 1))
    truth = Oracle(head_dir, embedding.weight).row(7, hidden[0].double(), 0, [0])
    torch.testing.assert_close(row[0].double(), truth, rtol=1e-5, atol=1e-5)


def test_the_loaded_head_describes_itself(tmp_path: Path, target_dir: Path) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, head_dim=24)
    embedding = _target_embedding(target_dir)
    config = AutoConfig.from_pretrained(target_dir)
    head = load_eagle3_head(
        head_dir, target_config=config, embed_tokens=embedding, dtype=torch.float32, device="cpu"
    )
    assert head.embed_tokens is embedding
    assert (head.num_heads, head.num_kv_heads, head.head_dim) == (4, 2, 24)
    assert (head.hidden_size, head.draft_vocab_size, head.aux_layer_ids) == (64, 96, (1, 2, 3))
    stored = load_file(head_dir / "model.safetensors")
    assert head.d2t is not None and head.d2t.dtype == torch.int64
    targets = torch.arange(96) + head.d2t
    assert torch.equal(stored["t2d"].nonzero().flatten(), targets)


def test_a_head_over_the_whole_vocabulary_has_no_d2t(tmp_path: Path, target_dir: Path) -> None:
    head = _load(tiny_eagle3_dir(tmp_path, target_dir, draft_vocab_size=300), target_dir)
    assert head.d2t is None
    assert head.logits(torch.ones(2, 64)).shape == (2, 300)


def test_int32_offsets_become_int64(tmp_path: Path, target_dir: Path) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir)
    weights = load_file(head_dir / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"].int()}, head_dir / "model.safetensors")
    head = _load(head_dir, target_dir)
    assert head.d2t is not None and head.d2t.dtype == torch.int64
    assert torch.equal(head.d2t, weights["d2t"])


def test_loading_a_wrong_head_raises_every_problem_at_once(tmp_path: Path, target_dir: Path) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, config_overrides={"vocab_size": 301})
    weights = load_file(head_dir / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, head_dir / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        _load(head_dir, target_dir)
    named = {problem.option for problem in caught.value.problems}
    assert {"speculative_model: vocab_size", "speculative_model: norm.weight"} <= named


def test_the_demo_head_predicts_its_target() -> None:
    """The trained head and its target meet in the real model: features, embedding and d2t are wired right.

    Layer ids off by one are too mild an error to show in one prompt; `aux_layer_ids` has its own test.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trtllm_tree.demo import resolve_head, resolve_target

    try:
        model_dir = resolve_target("demo")
    except ConfigError as error:
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    question = "A farmer has 12 cows and buys 7 more. Then he sells 5. How many cows does he have?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    head = load_eagle3_head(
        resolve_head("demo"),
        target_config=model.config,
        embed_tokens=model.get_input_embeddings(),
        dtype=torch.float32,
        device="cpu",
    )
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=48, do_sample=False)
        states = model(ids, output_hidden_states=True).hidden_states
        # hidden_states[i] is the stream that enters layer i.
        features = torch.cat([states[i][0, :-1] for i in head.aux_layer_ids], -1)
        host = DenseHost()
        num_rows = ids.shape[1] - 1
        host.visible = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        rows = head(ids[0, 1:], head.fuse(features), torch.arange(num_rows), host)
        drafts = head.logits(rows).argmax(-1)
    assert head.d2t is not None
    # Row i predicts token i + 2.
    predicted = (drafts + head.d2t[drafts])[:-1]
    answer = slice(prompt["input_ids"].shape[1] - 1, None)
    agreement = (predicted == ids[0, 2:])[answer].float().mean().item()
    assert agreement > 0.7, agreement


def test_config_json_of_the_demo_head_keeps_both_conventions_in_step() -> None:
    from trtllm_tree.demo import resolve_head
    from trtllm_tree.support.head import aux_layer_ids

    config = json.loads((resolve_head("demo") / "config.json").read_text())
    assert aux_layer_ids(config, 30) == (2, 15, 27)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert aux_layer_ids(config, 30) == (2, 15, 27)
    del config["eagle_config"]
    assert aux_layer_ids(config, 30) == (2, 15, 27)
