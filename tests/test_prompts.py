"""Prompts of every shape: which are one and which are many, what they are read as, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trtllm_tree import RequestError
from trtllm_tree.prompts import ReadPrompt, read_prompt, split_prompts

MESSAGE = {"role": "user", "content": "say a word"}
CHAT_TEXT = "<|im_start|>user\nsay a word<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "abc",
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        [MESSAGE],
        (MESSAGE,),
        [{"content": "x"}],
        {"prompt": "abc"},
        {"prompt_token_ids": [5]},
        [5, "a"],
        [1.5],
        None,
        3,
        b"abc",
    ],
)
def test_these_are_one_prompt(prompt: Any) -> None:
    prompts, is_single = split_prompts(prompt)
    assert is_single and len(prompts) == 1


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ([], 0),
        (["a", "b"], 2),
        (("a", [5]), 2),
        ([[5, 6], "a"], 2),
        ([np.array([5, 6]), np.array([7, 8])], 2),
        (np.array([[5, 6], [7, 8]]), 2),
        (torch.tensor([[5, 6], [7, 8], [9, 9]]), 3),
        ([[MESSAGE], [MESSAGE]], 2),
        ([{"prompt": "a"}, {"prompt_token_ids": [5]}], 2),
        ([None, "a"], 2),
    ],
)
def test_these_are_many(prompts: Any, count: int) -> None:
    split, is_single = split_prompts(prompts)
    assert not is_single and len(split) == count


def test_an_iterator_of_prompts_keeps_all_of_them() -> None:
    assert split_prompts(text for text in ("a", "b", "c")) == (["a", "b", "c"], False)


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6],
        (5, 6),
        iter([5, 6]),
        np.array([5, 6], dtype=np.int32),
        list(np.array([5, 6])),
        torch.tensor([5, 6]),
        list(torch.tensor([5, 6])),
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": np.array([5, 6])},
    ],
)
def test_ids_of_any_kind_become_pythons(tiny_tokenizer: Any, ids: Any) -> None:
    read = read_prompt(ids, tiny_tokenizer)
    assert read == ReadPrompt(None, [5, 6]) and {type(token) for token in read.token_ids} == {int}


def test_dicts_are_read_as_tensorrt_llm_and_vllm_read_them(tiny_tokenizer: Any) -> None:
    hello = tiny_tokenizer("hello")["input_ids"]
    assert read_prompt({"prompt": "hello"}, tiny_tokenizer) == ReadPrompt("hello", hello)
    both = {"prompt": "shown", "prompt_token_ids": [5, 6], "multi_modal_data": None}
    assert read_prompt(both, tiny_tokenizer) == ReadPrompt("shown", [5, 6])
    assert read_prompt({"prompt": "hello", "prompt_token_ids": None}, tiny_tokenizer).token_ids == hello


def test_chat_messages_go_through_the_template(tiny_tokenizer: Any) -> None:
    assert read_prompt([MESSAGE], tiny_tokenizer).token_ids == tiny_tokenizer(CHAT_TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, ["prompt"]),
        (3, ["prompt"]),
        (b"abc", ["prompt"]),
        ("\ud800", ["prompt"]),
        ([1, "a"], ["prompt"]),
        ([1.0, 2.0], ["prompt"]),
        ([True, False], ["prompt"]),
        (["abc"], ["prompt"]),
        ({}, ["prompt"]),
        ({"prompt": None}, ["prompt"]),
        ({"prompt": 5}, ["prompt['prompt']"]),
        ({"prompt_token_ids": "ab"}, ["prompt['prompt_token_ids']"]),
        ({"prompt_token_ids": [[5]]}, ["prompt['prompt_token_ids']"]),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}, "cache_salt": "x"},
            ["prompt['multi_modal_data']", "prompt['cache_salt']"],
        ),
        ({"prompt_embeds": [[0.1]]}, ["prompt['prompt_embeds']"]),
        (MESSAGE, ["prompt['role']", "prompt['content']"]),
        ([{"content": "x"}], ["prompt[0]"]),
        ([MESSAGE, {"role": "user", "content": None}, "x"], ["prompt[1]", "prompt[2]"]),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], ["prompt[0]"]),
    ],
)
def test_what_is_no_prompt_is_named(tiny_tokenizer: Any, prompt: Any, options: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompt(prompt, tiny_tokenizer)
    assert [problem.option for problem in caught.value.problems] == options
    assert all(problem.rule and problem.remedy for problem in caught.value.problems)


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('users only') }}", "{{ messages[0].content + 1 }}"]
)
def test_what_a_template_raises_is_that_prompts_error(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match="chat template cannot take it"):
        read_prompt([MESSAGE], tiny_tokenizer)
