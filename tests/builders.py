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


def tiny_deepseek_dir(
    root: Path,
    *,
    name: str = "deepseek",
    q_lora_rank: int | None = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a random DeepseekV3ForCausalLM (MLA; one dense layer, then three with experts) and return its folder.

    `overrides` are options of DeepseekV3Config. Every parameter is random, also those that start as ones and zeros.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    options: dict[str, object] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = DeepseekV3Config(**options | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(config)
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
    target_dir = root / name
    model.to(dtype=dtype).save_pretrained(target_dir)
    write_byte_tokenizer(target_dir, config.vocab_size)
    return target_dir


def tiny_sliding_dir(root: Path, kind: str, *, seed: int = 0, **overrides: object) -> Path:
    """Write a random model whose layers slide to `root / kind` and return its folder.

    `gemma3` mixes sliding and full layers and bounds its logits, `gpt_oss` has sinks besides, in `mistral` every
    layer slides without a list of layer types. Windows are shorter than most prompts. Every parameter is random.
    """
    import transformers

    shared: dict[str, object] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    mixed = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    if kind == "gemma3":
        own = {
            "layer_types": mixed,
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 30.0,
        }
        config = transformers.Gemma3TextConfig(**shared | own | overrides)
        build: type = transformers.Gemma3ForCausalLM
    elif kind == "gpt_oss":
        own = {"layer_types": mixed, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}
        # Its YaRN scaling is for this many positions.
        own["max_position_embeddings"] = 131_072
        config = transformers.GptOssConfig(**shared | own | overrides)
        build = transformers.GptOssForCausalLM
    else:
        assert kind == "mistral", kind
        config = transformers.MistralConfig(**shared | {"sliding_window": 10} | overrides)
        build = transformers.MistralForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config)
        for key, parameter in model.named_parameters():
            # Gemma's norms multiply by 1 + weight.
            if "norm" in key:
                torch.nn.init.normal_(parameter, mean=0.0 if kind == "gemma3" else 1.0, std=0.2)
            elif "embed_tokens" in key:
                # Small, so that what comes next depends on more than the last token.
                torch.nn.init.normal_(parameter, std=0.02)
            elif key.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=1.0 if key.endswith("sinks") else 0.2)
    target_dir = root / kind
    model.save_pretrained(target_dir)
    write_byte_tokenizer(target_dir, config.vocab_size)
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
