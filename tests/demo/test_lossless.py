"""On the demo model, drafts change how many forwards it takes and nothing else.

In float32 (CPU) plain, chain and tree must agree token for token. In bfloat16 (GPU) a forward of 32 rows rounds
differently from one of 1 row, so a first divergence is allowed where the target's two top logits differ by less
than bfloat16's spacing there; the gap is printed.
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
    """Whether two runs in bfloat16 may differ at a token: the two top logits must be closer than bfloat16 rounds.

    The same weights in float32 give the true logits of that position. Both choices must lie less than one
    bfloat16 spacing, at the top logit's size, below the top.
    """

    def __init__(self) -> None:
        load = AutoModelForCausalLM.from_pretrained
        self._model = load(resolve_target("demo"), dtype=torch.bfloat16).to("cuda").float()
        self.gaps: list[float] = []

    @torch.inference_mode()
    def check(self, prompt_ids: list[int], want: list[int], got: list[int]) -> None:
        """Print the logit gap at the first difference, and refuse one that rounding cannot explain."""
        at = next(i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
        logits = self._model(torch.tensor([prompt_ids + want[:at]], device="cuda")).logits[0, -1]
        top = logits.max().item()
        spacing = 2.0 ** (math.floor(math.log2(abs(top))) - 7)
        gap = top - min(logits[want[at]].item(), logits[got[at]].item())
        print(
            f"token {at}: {want[at]} or {got[at]}, logit gap {gap:.4f} at {top:.2f}, "
            f"{gap / spacing:.2f} of a bf16 spacing"
        )
        self.gaps.append(gap / spacing)


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
    if near_tie is not None:
        assert max(near_tie.gaps) < 1, "two top logits a bf16 spacing apart or more, and still a divergence"
