"""Trees from the MTP layer of a hybrid target over the runtime double: its states, and what is drafted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hosts.tensorrt_llm.hybrid_runs import hybrid_mtp_dir
from tests.hosts.tensorrt_llm.mtp_runs import slow_tree
from tests.hosts.tensorrt_llm.tree_runs import (
    MAIN,
    plain_executor,
    prompts_of,
    tree_executor,
)
from tests.hosts.tensorrt_llm.worker.runs import Rounds, run
from trtllm_tree.hosts.tensorrt_llm.recurrent import layers_with_rows

# More than a batch holds: prompts arrive while others decode.
PROMPTS = prompts_of(5, 31, 33, 64, 1)
TOKENS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_mtp_dir(tmp_path_factory.mktemp("hybrid_mtp"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_manager": "v2", "separate": True, "tokens_per_block": 32},
        {"overlap": True, "graph_batch_sizes": [1, 3], "max_chunk": 7},
    ],
    ids=["plain", "v2", "overlap"],
)
def test_a_tree_generates_what_plain_decoding_does(
    layout: str, target: Path, options: dict[str, Any]
) -> None:
    plain = plain_executor(target, max_batch_size=3).generate(PROMPTS, max_tokens=TOKENS)
    executor = tree_executor(target, None, max_batch_size=3, **options)
    requests = run(executor, PROMPTS, counts=[TOKENS] * len(PROMPTS))
    assert [request.generated for request in requests] == plain
    kept = [count for request in requests for count in request.accepted_history]
    assert max(kept) >= 2 and 0 in kept, "the drafts of this layer are neither always right nor always wrong"


def test_rows_and_states_behind_every_step_are_those_of_plain_decoding(layout: str, target: Path) -> None:
    def state_of(executor: Any, request: Any) -> torch.Tensor:
        manager = executor.kv_cache_manager
        return manager.states[:, manager._state_of[request.py_request_id]].clone()

    plain, wanted = plain_executor(target, max_batch_size=3), {}
    requests = [plain.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    while plain.step():
        for index, request in enumerate(requests):
            if request.py_request_id in plain.kv_cache_manager._state_of:
                wanted[index, len(request.tokens)] = state_of(plain, request)
    executor, compared, jumps = tree_executor(target, None, max_batch_size=3), 0, 0
    assert list(executor.model.spec_worker._parts.pool.layers) == [2, 5]
    assert layers_with_rows(executor.kv_cache_manager) == [2, 5, 6], "and the MTP layer's"
    requests = [executor.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    while executor.step():
        for index, request in enumerate(requests):
            state = wanted.get((index, len(request.tokens)))
            if state is not None and request.py_request_id in executor.kv_cache_manager._state_of:
                torch.testing.assert_close(state_of(executor, request), state, rtol=1e-4, atol=1e-5)
                compared += 1
                jumps += bool(request.accepted_history and request.accepted_history[-1])
    assert compared > TOKENS and jumps > 5


class SlowNemotronMtp:
    """The MTP layer over whole sequences: attention without positions, an MLP, and the norm behind them."""

    def __init__(self, target: Path) -> None:
        self.config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        self.w = load_file(target / "model.safetensors")

    def rows(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """See `SlowGlmMtp.rows`."""
        w, dim = self.w, self.config["head_dim"]
        embedded = self._norm(w["model.embed_tokens.weight"][list(tokens)], "0.enorm")
        x = torch.cat((embedded, self._norm(hidden, "0.hnorm")), dim=-1) @ w["mtp.layers.0.eh_proj.weight"].T
        normed = self._norm(x, "0.norm")
        q, k, v = (
            (normed @ w[f"mtp.layers.0.mixer.{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv"
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w["mtp.layers.0.mixer.o_proj.weight"].T
        normed = self._norm(x, "1.norm")
        gate, up, down = (w[f"mtp.layers.1.mixer.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return self._norm(x, "1.final_layernorm")

    def scores(self, row: torch.Tensor) -> torch.Tensor:
        return (row @ self.w["lm_head.weight"].T).log_softmax(-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["layer_norm_epsilon"])
        return x * scale * self.w[f"mtp.layers.{name}.weight"]


def last_rows(target: Path, text: list[int]) -> torch.Tensor:
    """The target's last hidden rows over a whole text, [T, H]."""
    executor, found = plain_executor(target), []
    model = executor.model.model
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(inner(*args, **kwargs))
        return found[-1]

    model.forward = forward
    executor.submit(text, max_tokens=1)
    executor.step()
    return found[0]


def test_every_drafted_tree_is_the_slow_one(layout: str, target: Path) -> None:
    prompt, rounds, layer = PROMPTS[2], Rounds(), SlowNemotronMtp(target)
    executor = tree_executor(target, None)
    executor.model.spec_worker.spec_round.observer = rounds
    (request,) = run(executor, [prompt], counts=[TOKENS])
    text = [*prompt, *request.generated]
    hidden, length, compared = last_rows(target, text), len(prompt) + 1, 0
    for tokens, parents, accepted in zip(rounds.tokens, rounds.parents, [*rounds.accepted, [0]], strict=True):
        if length > len(text):
            break
        wanted = slow_tree(layer, text[:length], hidden[: length - 1], MAIN)
        assert (tokens[0], parents[0]) == wanted
        length, compared = length + accepted[0], compared + 1
    assert compared > TOKENS // 3
