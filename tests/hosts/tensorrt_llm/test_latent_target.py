"""Trees over a latent (MLA) target with a head of grouped heads, over the runtime double: tokens, paths and rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir
from tests.hosts.tensorrt_llm.tree_runs import plain_executor, prompts_of, tree_double, tree_executor


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and head that choose among the same few tokens, so that drafts are often accepted."""
    root = tmp_path_factory.mktemp("latent")
    target = tiny_deepseek_dir(root)
    head = tiny_eagle3_dir(root, target, head_dim=16)
    offsets = load_file(head / "model.safetensors")["d2t"]
    likely = torch.arange(4) * 20
    for path, rows in (
        (head / "model.safetensors", likely),
        (target / "model.safetensors", likely + offsets[likely]),
    ):
        weights = load_file(path)
        kept = weights["lm_head.weight"][rows[::2]]
        weights["lm_head.weight"] *= 0.1
        weights["lm_head.weight"][rows] = torch.stack((kept, -kept), dim=1).flatten(0, 1)
        save_file(weights, path, metadata={"format": "pt"})
    return target, head


@pytest.mark.parametrize(
    "layout, manager, overlap", [("new", "v1", False), ("new", "v2", True), ("old", "v1", True)]
)
def test_a_latent_target_verifies_trees(tmp_path, monkeypatch, checkpoints, layout, manager, overlap):
    target, head = checkpoints
    # Five prompts on three slots: prefills join running decodes.
    prompts = prompts_of(5, 33, 3, 17, 8)
    options = {"kv_manager": manager, "max_batch_size": 3, "tokens_per_block": 16}
    with tree_double(tmp_path, layout, monkeypatch):
        plain = plain_executor(target, **options).generate(prompts, max_tokens=24)
        executor = tree_executor(target, head, (4, 3, 10), separate=True, overlap=overlap, **options)
        requests = [executor.submit(prompt, max_tokens=24) for prompt in prompts]
        while executor.step():
            pass
    assert [request.generated for request in requests] == plain
    accepted = [count for request in requests for count in request.accepted_history]
    assert max(accepted) >= 2 and sum(accepted) > len(accepted) / 2, accepted
