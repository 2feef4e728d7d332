"""What a caller may hand to `LLM.generate` as prompts, read into text and token ids.

Owns which shapes are one prompt and which are many, and the error of a prompt that is neither. Must not know engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

from trtllm_tree.config.tree_rules import is_int
from trtllm_tree.errors import Problem, RequestError

# A text, token ids, chat messages, or a dict with the key prompt or prompt_token_ids.
Prompt = str | list[int] | list[dict[str, str]] | dict[str, Any]

_TEXT, _IDS = "prompt", "prompt_token_ids"
_KIND_RULE = "must be a text, token ids, chat messages, or a dict with prompt or prompt_token_ids"
_REMEDY = "Pass one of these."


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt. `text` is None for what was no text."""

    text: str | None
    token_ids: list[int]


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The single prompts in what a caller passed, and whether it was one prompt and no batch.

    A list is one prompt if its first item is a token id or a chat message; an empty one is a batch of none. Any
    iterable is a batch as a list is.
    """
    prompts = _as_list(prompts)
    if not isinstance(prompts, list):
        return [prompts], True
    if prompts and (_is_number(prompts[0]) or _is_message(prompts[0])):
        return [prompts], True
    return prompts, False


def read_prompt(prompt: Any, tokenizer: Any) -> ReadPrompt:
    """The text and the token ids of one prompt; chat messages go through the model's chat template.

    Raises:
        RequestError: it is no prompt, or the tokenizer or the template cannot take it.
    """
    prompt = _as_list(prompt)
    if isinstance(prompt, str):
        return ReadPrompt(prompt, _encoded(prompt, tokenizer))
    if isinstance(prompt, Mapping):
        return _read_dict(prompt, tokenizer)
    if not isinstance(prompt, list):
        raise RequestError(Problem("prompt", prompt, f"{_KIND_RULE}, is a {type(prompt).__name__}", _REMEDY))
    if prompt and isinstance(prompt[0], Mapping):
        return ReadPrompt(None, _read_chat(prompt, tokenizer))
    return ReadPrompt(None, _read_ids("prompt", prompt))


def _as_list(value: Any) -> Any:
    """Iterables that are neither texts nor dicts as lists; arrays and tensors with Python's numbers in them."""
    value = _plain(value)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return value
    return list(value)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their numbers as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_number(item: Any) -> bool:
    return isinstance(_plain(item), Number)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and ("role" in item or "content" in item)


def _encoded(text: str, tokenizer: Any) -> list[int]:
    try:
        return list(tokenizer(text)["input_ids"])
    # What tokenizers make of a text that is no Unicode, as one with half of a surrogate pair.
    except (TypeError, ValueError) as error:
        rule = f"the model's tokenizer cannot take it: {error}"
        raise RequestError(Problem("prompt", text, rule, "Pass a text that UTF-8 can hold.")) from error


def _read_ids(option: str, ids: Any) -> list[int]:
    items = _as_list(ids)
    if isinstance(items, list):
        items = [_plain(item) for item in items]
        if all(map(is_int, items)):
            return items
        items = [item for item in items if not is_int(item)][:5]
    rule = "token ids are a list of integers"
    raise RequestError(Problem(option, items, rule, "Pass a text, or what the tokenizer makes of it."))


def _read_dict(prompt: Mapping[str, Any], tokenizer: Any) -> ReadPrompt:
    """A prompt as TensorRT-LLM and vLLM take it; what else they know in it is refused unless it is None."""
    given = {str(key): value for key, value in prompt.items() if value is not None}
    remedy = "Leave it out; the keys are prompt (a text) and prompt_token_ids."
    problems = [
        Problem(f"prompt[{key!r}]", value, "is not served here", remedy)
        for key, value in given.items()
        if key not in (_TEXT, _IDS)
    ]
    text = given.get(_TEXT)
    if text is not None and not isinstance(text, str):
        problems.append(
            Problem(f"prompt[{_TEXT!r}]", text, "must be a text", "Pass ids as prompt_token_ids.")
        )
    if not problems and not given:
        problems.append(
            Problem("prompt", dict(prompt), "has neither prompt nor prompt_token_ids", "Add one.")
        )
    if problems:
        raise RequestError(problems)
    if _IDS in given:
        return ReadPrompt(text, _read_ids(f"prompt[{_IDS!r}]", given[_IDS]))
    assert isinstance(text, str), "one of both is given"
    return ReadPrompt(text, _encoded(text, tokenizer))


def _read_chat(messages: list[Any], tokenizer: Any) -> list[int]:
    remedy = 'Write messages as {"role": "user", "content": "..."}.'
    rule = "a chat message has a role and a content, both texts"
    problems = [
        Problem(f"prompt[{index}]", message, rule, remedy)
        for index, message in enumerate(messages)
        if not isinstance(message, Mapping)
        or not all(isinstance(message.get(key), str) for key in ("role", "content"))
    ]
    if problems:
        raise RequestError(problems)
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    # A template is a program that came with the model, and may raise anything about its messages.
    except Exception as error:
        rule = f"the model's chat template cannot take it: {error}"
        remedy = "Change the messages, or pass a text."
        raise RequestError(Problem("prompt", messages, rule, remedy)) from error
    return list(ids["input_ids"])
