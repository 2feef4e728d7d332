"""What one request asks for: length, stops, sampling.

A bad value is found by `validate` when the request is added, never on construction, so that one bad request
fails alone; only an unknown name is found at once. An option that cannot be honoured is named, never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

from trtllm_tree.config.guided_decoding import GuidedDecodingParams
from trtllm_tree.config.option_names import refuse_unknown
from trtllm_tree.config.tree_rules import is_int
from trtllm_tree.errors import Problem

# Far above any use, and small enough that no float32 overflows.
MAX_TEMPERATURE = MAX_EDIT = 1e6
# Per request: ids that logit_bias, min_tokens and bad words of one token edit; bad words of several tokens, and theirs.
MAX_EDITED_IDS = 2048
MAX_BAD_WORDS = 512
MAX_BAD_WORD_LEN = 32
# As many as OpenAI's interface has.
MAX_LOGPROBS = 20


@refuse_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Names and defaults as in TensorRT-LLM and vLLM.

    Args:
        max_tokens: tokens to generate at most.
        temperature: 0 decodes greedily, whatever the other sampling options say. None is 1 where top_k or top_p is
            given, and greedy without both, as in TensorRT-LLM.
        top_k: draw among the `top_k` likeliest tokens; 0 or None: among all.
        top_p: of these, among the likeliest that together hold at least this much probability.
        min_p: of these, among tokens at least `min_p` times as likely as the likeliest.
        seed: same seed, same tokens, however the request is batched and whatever is drafted. None draws one.
        repetition_penalty: logits of ids in the prompt or the output are divided by it where positive, else multiplied.
        frequency_penalty: taken off an id's logit for every time it is in the output.
        presence_penalty: taken off the logits of ids in the output, once.
        logit_bias: token id -> what is added to its logit; -inf is no bias, `bad_words_ids` bans.
        min_tokens: tokens to generate before an end token, a stop id or a stop string can end the output.
        bad_words: strings that are not generated, as the tokens they have at the start of a text and behind a space.
        bad_words_ids: token sequences that are not generated.
        guided_decoding: a grammar that the output follows; its end ends the output, with the model's end token.
        logprobs: return every output token's log-probability, rank and this many likeliest tokens, 0 to 20; by the
            model's raw logits: before temperature, penalties, bans and grammars.
        prompt_logprobs: the same of every prompt token but the first. Prefill then computes logits of all its rows.
        stop: strings that end the output.
        stop_token_ids: token ids that end the output, besides the model's own end token.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not stop at the model's end token, unless a grammar has ended.
        skip_special_tokens: leave special tokens out of the text.
        n: completions per prompt; only 1 is served yet.

    Raises:
        ConfigError: an option that there is none of, with the nearest one.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn and not the likeliest."""
        if self.temperature is None:
            return self.top_k is not None or self.top_p is not None
        return bool(self.temperature)

    def resolved(self) -> SamplingParams:
        """The same, with the temperature that valid params are decoded at."""
        if self.temperature is not None:
            return self
        return replace(self, temperature=1.0 if self.is_sampled else 0.0)

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence; (1, 0, 0) changes nothing."""
        repetition = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return repetition, self.frequency_penalty or 0.0, self.presence_penalty or 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens have to be counted."""
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def validate(self) -> list[Problem]:
        """Every option that is wrong or cannot be honoured; empty if the request can be served."""
        problems = self._sampling_problems() + self._edit_problems() + self._stop_problems()
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            problems.append(_wrong("max_tokens", self.max_tokens, "must be a positive integer", 32))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                rule, remedy = "must be true or false", f"Set {name} to True or False."
                problems.append(Problem(name, getattr(self, name), rule, remedy))
        if isinstance(self.guided_decoding, GuidedDecodingParams):
            problems += self.guided_decoding.problems()
        elif self.guided_decoding is not None:
            rule, remedy = (
                "must be GuidedDecodingParams",
                "Pass GuidedDecodingParams(json=...), or leave it out.",
            )
            problems.append(Problem("guided_decoding", self.guided_decoding, rule, remedy))
        return problems

    def _sampling_problems(self) -> list[Problem]:
        problems = []
        temperature = self.temperature
        if temperature is not None and not (_is_number(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
            rule = f"must be a number >= 0, at most {MAX_TEMPERATURE:.0f}"
            problems.append(_wrong("temperature", temperature, rule, 1.0))
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            problems.append(_wrong("top_p", self.top_p, "must be a number with 0 < top_p <= 1", 1.0))
        if self.top_k is not None and not (is_int(self.top_k) and self.top_k >= 0):
            problems.append(_wrong("top_k", self.top_k, "must be an integer >= 0 (0 keeps every token)", 0))
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            problems.append(_wrong("min_p", self.min_p, "must be a number with 0 <= min_p <= 1", 0))
        if self.seed is not None and not (is_int(self.seed) and 0 <= self.seed < 2**64):
            problems.append(_wrong("seed", self.seed, "must be an integer with 0 <= seed < 2**64", 0))
        if not is_int(self.n) or self.n < 1:
            problems.append(_wrong("n", self.n, "must be a positive integer", 1))
        elif self.n > 1:
            problems.append(_wrong("n", self.n, "one completion per prompt is served so far", 1))
        return problems

    def _edit_problems(self) -> list[Problem]:
        problems = []
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and -2 <= value <= 2):
                problems.append(_wrong(name, value, "must be a number between -2 and 2", 0.0))
        repetition = self.repetition_penalty
        if repetition is not None and not (_is_number(repetition) and 1 / MAX_EDIT <= repetition <= MAX_EDIT):
            rule = f"must be a number between {1 / MAX_EDIT} and {MAX_EDIT:.0f}"
            problems.append(_wrong("repetition_penalty", repetition, rule, 1.0))
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, dict)
            and all(is_int(token) and token >= 0 for token in bias)
            and all(_is_number(value) and abs(value) <= MAX_EDIT for value in bias.values())
        ):
            rule = f"must map token ids >= 0 to numbers of at most {MAX_EDIT:.0f} in size"
            has_ids = isinstance(bias, dict) and all(map(is_int, bias))
            remedy = "Ban tokens with bad_words_ids." if has_ids else "Write ids as integers: {42: -1.5}."
            problems.append(Problem("logit_bias", bias, rule, remedy))
        if not is_int(self.min_tokens) or self.min_tokens < 0:
            problems.append(_wrong("min_tokens", self.min_tokens, "must be an integer >= 0", 0))
        elif is_int(self.max_tokens) and self.min_tokens > self.max_tokens > 0:
            rule = f"must be at most max_tokens = {self.max_tokens}"
            problems.append(_wrong("min_tokens", self.min_tokens, rule, self.max_tokens))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (is_int(value) and 0 <= value <= MAX_LOGPROBS):
                problems.append(_wrong(name, value, f"must be an integer from 0 to {MAX_LOGPROBS}", 1))
        words = self.bad_words
        if words is not None and not (
            isinstance(words, list) and all(isinstance(word, str) and word.strip() for word in words)
        ):
            rule, remedy = "must be a list of strings that are not blank", "Leave it out for none."
            problems.append(Problem("bad_words", words, rule, remedy))
        ids = self.bad_words_ids
        if ids is not None and not (isinstance(ids, list) and all(_is_token_list(word) for word in ids)):
            rule, remedy = "must be a list of non-empty lists of token ids >= 0", "Leave it out for none."
            problems.append(Problem("bad_words_ids", ids, rule, remedy))
        return problems

    def _stop_problems(self) -> list[Problem]:
        problems = []
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops is not None and not (
            isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
        ):
            rule, remedy = "must be a non-empty string or a list of them", "Leave it out for no stop string."
            problems.append(Problem("stop", self.stop, rule, remedy))
        ids = self.stop_token_ids
        if ids is not None and not (isinstance(ids, list) and all(is_int(id_) and id_ >= 0 for id_ in ids)):
            rule, remedy = "must be a list of token ids >= 0", "Leave it out for no stop token."
            problems.append(Problem("stop_token_ids", ids, rule, remedy))
        return problems


def _wrong(option: str, value: object, rule: str, working: object) -> Problem:
    return Problem(option, value, rule, f"Set {option} to {working}.")


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_int(token) and token >= 0 for token in value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
