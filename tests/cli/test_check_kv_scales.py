"""`trtllm-tree check` names the KV scales that an FP8 cache would not honour, from files alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from trtllm_tree.cli.main import main
from trtllm_tree.demo import resolve_head

SCALE = "model.layers.3.self_attn.v_proj.v_scale"


@pytest.mark.parametrize(
    ("host", "topk", "kv_dtype", "refused"),
    [
        ("embedded", 4, "fp8", True),
        ("embedded", 1, "fp8", True),
        ("embedded", 4, "auto", False),
        ("tensorrt_llm", 4, "fp8", True),
        ("tensorrt_llm", 1, "fp8", False),  # its own attention takes scales
    ],
)
def test_a_scaled_checkpoint_is_refused_where_the_cache_would_be_fp8_and_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str, topk: int, kv_dtype: str, refused: bool
) -> None:
    sizes = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    save_file({SCALE: np.array([0.5], dtype=np.float32)}, tmp_path / "model.safetensors")
    content = {
        "model": str(tmp_path),
        "kv_cache_config": {"dtype": kv_dtype},
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 5,
            "speculative_model": str(resolve_head("demo")),
            "use_dynamic_tree": topk > 1,
            "dynamic_tree_max_topK": topk,
        }
        | ({"max_total_draft_tokens": 20} if topk > 1 else {}),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    code = main(["check", str(path), "--host", host, "--json"])
    report = json.loads(capsys.readouterr().out)
    options = [problem["option"] for problem in report["problems"] if "scale" in problem["rule"]]
    assert options == ([f"model: {SCALE}"] if refused else [])
    assert code == (1 if report["problems"] else 0)
    assert report["resolved"]["kv_cache_dtype"] == kv_dtype
