"""GGUF to Hugging Face, for Llama-architecture files with a byte-level BPE vocabulary.

Owns the tensor names, the inverse of llama.cpp's Q/K row order and the rebuilt tokenizer. Knows nothing of
where the file comes from, of caches or of checksums; `target.py` does. Heavy imports stay inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

HF_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token type for control tokens (gguf.TokenType.CONTROL).
_CONTROL_TOKEN = 3


def convert(gguf_path: Path, out_dir: Path, *, on_tensor: Callable[[int, int], None] | None = None) -> None:
    """Write the files `HF_FILES` for the model in `gguf_path` into `out_dir`; weights become bfloat16.

    Args:
        gguf_path: a GGUF file of architecture `llama` whose tokenizer is byte-level BPE (`gpt2`).
        out_dir: an existing folder.
        on_tensor: called with (tensors done, tensors in all) after each tensor.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama", "only Llama-architecture GGUF files can be converted"
    assert fields["tokenizer.ggml.model"] == "gpt2", "only byte-level BPE vocabularies can be converted"

    weights = _weights(reader, fields, on_tensor)
    # transformers reads the framework from this metadata entry.
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", _model_config(fields, is_tied="lm_head.weight" not in weights))
    _write_json(out_dir / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, out_dir)


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of one GGUF tensor: `blk.3.attn_q.weight` is layer 3's `q_proj.weight`."""
    stem, _, kind = gguf_name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def unpermute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a Q or K projection `[num_heads * D, in]` in Hugging Face's order.

    llama.cpp interleaves the two rotary halves of every head (row 2i is channel i, row 2i + 1 is channel
    i + D/2); transformers keeps the halves apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _weights(
    reader: GGUFReader, fields: dict[str, Any], on_tensor: Callable[[int, int], None] | None
) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute_rows(weight, heads[part])
        # The file is memory-mapped read-only and F32 tensors come back as views of it.
        owned = np.array(weight, dtype=np.float32, order="C")
        weights[hf_name(tensor.name)] = torch.from_numpy(owned).to(torch.bfloat16)
        if on_tensor is not None:
            on_tensor(done, len(reader.tensors))
    return weights


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _model_config(fields: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    # The flat rope_theta / torch_dtype spelling is read by transformers 4 and 5 alike.
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: the shortest decimal of that float is the value that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        **_special_ids(fields),
    }


def _write_tokenizer(fields: dict[str, Any], out_dir: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    # SmolLM's pre-tokenizer: every digit is a word of its own, then the byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.save(str(out_dir / "tokenizer.json"))
    ids = _special_ids(fields)
    settings = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer would drop the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": words[ids["bos_token_id"]],
        "eos_token": words[ids["eos_token_id"]],
        "pad_token": words[ids["pad_token_id"]],
        "unk_token": words[fields["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": control,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(out_dir / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
