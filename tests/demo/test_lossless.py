"""On the demo model, drafts change how many forwards it takes and nothing else.

In float32 (CPU) plain, chain and tree must agree token for token. In bfloat16 (GPU) a forward of 32 rows rounds
differently from one of 1 row, so a first divergence is allowed where the target's best logits lie within the
rounding of bfloat16; the gap is printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.demo.prompts import PROMPTS
from trtllm_tree import LLM, RequestOutput, SamplingParams
from trtllm_tree.demo import resolve_target

MAX_TOKENS = 128
HALVES = {"first": PROMPTS[: len(PROMPTS) // 2], "second": PROMPTS[len(PROMPTS) // 2 :]}


def _run(llm: LLM, prompts: list[str]) -> list[RequestOutput]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.generate(chats, SamplingParams(max_tokens=MAX_TOKENS))


class NearTie:
    """Whether two runs in bfloat16 may differ at a token: both choices must lie within bfloat16's own error.

    The same weights in float32 give the true logits; how far bfloat16 arithmetic strays from them at this
    position (the largest error over the vocabulary) bounds its rounding, and neither choice may lie further below
    the true top. One bfloat16 spacing of the top logit would be a stricter bound; it does not hold.
    """

    def __init__(self) -> None:
        load = AutoModelForCausalLM.from_pretrained
        self._low = load(resolve_target("demo"), dtype=torch.bfloat16).to("cuda")
        self._high = load(resolve_target("demo"), dtype=torch.bfloat16).to("cuda").float()

    @torch.inference_mode()
    def check(self, prompt_ids: list[int], want: list[int], got: list[int]) -> None:
        """Print the logit gap at the first difference, and refuse one that rounding cannot explain."""
        at = next(i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
        ids = torch.tensor([prompt_ids + want[:at]], device="cuda")
        low, high = (model(ids).logits[0, -1].float() for model in (self._low, self._high))
        rounding = (low - high).abs().max().item()
        gap = (high[want[at]] - high[got[at]]).abs().item()
        spacing = 2.0 ** (math.floor(math.log2(high.max().item())) - 7)
        print(
            f"token {at}: {want[at]} or {got[at]}, logit gap {gap:.4f} (in bf16 "
            f"{(low[want[at]] - low[got[at]]).abs().item():.4f}), bf16 error {rounding:.4f}, spacing {spacing:.4f}"
        )
        for token in (want[at], got[at]):
            assert high.max().item() - high[token].item() < rounding


@pytest.mark.parametrize("half", HALVES)
def test_chain_and_tree_give_the_tokens_of_plain_decoding(demo_llm: Callable[[str], LLM], half: str) -> None:
    prompts = HALVES[half]
    plain = _run(demo_llm("plain"), prompts)
    near_tie = None
    for kind in ("chain", "tree"):
        outputs = _run(demo_llm(kind), prompts)
        for prompt, want, got in zip(prompts, plain, outputs, strict=True):
            a, b = want.outputs[0], got.outputs[0]
            if a.token_ids == b.token_ids:
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
                continue
            assert demo_llm(kind).engine.runner.dtype == torch.bfloat16, f"{kind} diverges on {prompt!r}"
            print(f"{kind} diverges on {prompt!r}:", end=" ")
            near_tie = near_tie or NearTie()
            near_tie.check(want.prompt_token_ids, a.token_ids, b.token_ids)
        drafted = sum(output.acceptance.target_forwards for output in outputs)
        plainly = sum(output.acceptance.target_forwards for output in plain)
        assert drafted < 0.6 * plainly, "drafting should need far fewer target forwards"
