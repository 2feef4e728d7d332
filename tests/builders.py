"""Small random model directories for tests: a Llama target with a tokenizer, and an EAGLE3 head for it.

Seeds are fixed: one set of arguments gives the same weights on every run. Nothing here is trained, so these
models exercise layouts and arithmetic, never quality.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama_dir(
    root: Path,
    *,
    name: str = "target",
    vocab_size: int = 300,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 2048,
    tie_embeddings: bool = True,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.2,
    seed: int = 0,
) -> Path:
    """Write a random LlamaForCausalLM and a byte-level tokenizer to `root / name` and return that folder.

    `initializer_range` is large so that greedy decoding wanders instead of repeating one token.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    target_dir = root / name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(dtype=dtype).save_pretrained(target_dir)
    write_byte_tokenizer(target_dir, vocab_size)
    return target_dir


def write_byte_tokenizer(target_dir: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of `vocab_size` ids: specials, 256 bytes, then letter pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(SPECIAL_TOKENS) - len(symbols)
    pairs = list(itertools.product("aeiou", string.ascii_lowercase))[: max(num_merges, 0)]
    assert len(pairs) == num_merges, f"a tiny vocabulary has 259 to 389 ids, not {vocab_size}"
    words = [*SPECIAL_TOKENS, *symbols, *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in SPECIAL_TOKENS]
    )
    tokenizer.save(str(target_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (target_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def tiny_eagle3_dir(
    root: Path,
    target_dir: Path,
    *,
    name: str = "head",
    draft_vocab_size: int = 96,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    own_embedding: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    config_overrides: Mapping[str, object] | None = None,
) -> Path:
    """Write a random EAGLE3 head for `target_dir` to `root / name` and return that folder.

    A `draft_vocab_size` below the target's vocabulary gets `d2t` (offsets) and `t2d`; an equal one,
    neither.
    `config_overrides` are merged into config.json last.
    """
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden, vocab, layers = target["hidden_size"], target["vocab_size"], target["num_hidden_layers"]
    if head_dim is None:
        head_dim = hidden // num_heads
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
    }
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (num_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (num_kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (num_kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, num_heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (intermediate_size, hidden),
        "midlayer.mlp.up_proj.weight": (intermediate_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, intermediate_size),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    weights = {
        key: torch.randn(shape, generator=generator) * (2.0 / shape[1] ** 0.5)
        for key, shape in shapes.items()
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    for norm in norms:
        weights[f"{norm}.weight"] = 1.0 + 0.3 * torch.randn(hidden, generator=generator)
    weights = {key: weight.to(dtype) for key, weight in weights.items()}
    if draft_vocab_size < vocab:
        targets = torch.randperm(vocab, generator=generator)[:draft_vocab_size].sort().values
        weights["d2t"] = targets - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, targets, True)

    head_dir = root / name
    head_dir.mkdir(parents=True)
    save_file(weights, head_dir / "model.safetensors")
    config.update(config_overrides or {})
    (head_dir / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return head_dir
