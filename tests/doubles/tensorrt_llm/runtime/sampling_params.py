"""What a request asks for, as `tensorrt_llm.SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .requests import SamplingConfig


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Without temperature, top_k and top_p a request is greedy."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    bad: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: Any = None
    embedding_bias: Any = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be within 0 and 1, got {self.top_p}")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def config(self) -> SamplingConfig:
        """As the executor's requests carry it."""
        values = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
        values["random_seed"] = self.seed
        return SamplingConfig(**{name: None if value is None else [value] for name, value in values.items()})
