"""What a request's options mean when they are left out, misspelled or of another kind of number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtllm_tree.config import EngineConfig, GuidedDecodingParams, SamplingParams, SpeculativeConfig
from trtllm_tree.errors import ConfigError


def test_an_option_of_a_request_that_there_is_none_of_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_tokens=3, max_new_tokens=4, beam_width=2)  # type: ignore[call-arg]
    assert {problem.option: problem.remedy for problem in caught.value.problems} == {
        "max_new_tokens": "Did you mean max_tokens?",
        "beam_width": "Remove it.",
    }
    for options_class, typo, remedy in (
        (SpeculativeConfig, "tree_topK", "Did you mean tree_topk?"),
        (EngineConfig, "max_batchsize", "Did you mean max_batch_size?"),
        (GuidedDecodingParams, "regexp", "Did you mean regex?"),
    ):
        with pytest.raises(ConfigError) as caught:
            options_class(**{typo: 4})
        (problem,) = caught.value.problems
        assert (problem.option, problem.value, problem.remedy) == (typo, 4, remedy)
        assert options_class.__name__ in problem.rule


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"min_p": 0.1, "seed": 3}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_k": 0}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 0.9, "temperature": 0.7}, 0.7),
        ({"top_p": 0.9, "temperature": 0}, 0),
    ],
)
def test_the_temperature_that_is_left_out_is_tensorrt_llms(
    options: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(**options)
    assert params.resolved().temperature == temperature
    assert params.is_sampled == params.resolved().is_sampled == (temperature > 0)


def test_numbers_of_numpy_are_numbers() -> None:
    assert SamplingParams(temperature=np.float32(0.7), top_p=np.float64(0.9)).validate() == []  # type: ignore[arg-type]
    assert SamplingParams(temperature=np.float32("nan")).validate() != []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"logit_bias": {"1": 5.0}}, "Write ids as integers: {42: -1.5}."),
        ({"logit_bias": {1: float("-inf")}}, "Ban tokens with bad_words_ids."),
        ({"skip_special_tokens": 0}, "Set skip_special_tokens to True or False."),
    ],
)
def test_remedies_say_what_works(options: dict[str, Any], remedy: str) -> None:
    (problem,) = SamplingParams(**options).validate()
    assert problem.remedy == remedy
