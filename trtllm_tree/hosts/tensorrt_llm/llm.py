"""`LLM(model, host="tensorrt_llm")`: a tensorrt_llm.LLM built from our options, its results in our shapes.

Owns the translation of options, sampling parameters and results. Must not know how trees are run: that is the plugin,
in TensorRT-LLM's own processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.host_rules import (
    ATTENTION_LIBRARY,
    LIBRARIES_VARIABLE,
    TREE_ENVIRONMENT,
    demo_name_problems,
    host_problems,
)
from trtllm_tree.config.keys import ENGINE_FIELDS, unknown_key_problems
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, HostUnavailableError, Problem, RequestError
from trtllm_tree.outputs import AcceptanceStats, CompletionOutput, RequestOutput
from trtllm_tree.support.head import aux_layer_ids

MISSING = (
    "host = 'tensorrt_llm': TensorRT-LLM is not installed here. Install tensorrt_llm (NVIDIA's containers bring it), "
    "or use host='embedded'."
)
_LAYERS_OPTION = "eagle3_layers_to_capture"
EMPTY_PROMPT = Problem("prompt", "", "must have at least one token", "Send a non-empty prompt.")
REQUEST_RULE = "is not served with host='tensorrt_llm'"
# Options of a request that not every run serves, and the values that ask for nothing.
_CHECKED: dict[str, tuple[object, ...]] = {
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "frequency_penalty": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "logit_bias": (None, {}),
    "min_tokens": (0,),
    "bad_words": (None, []),
    "bad_words_ids": (None, []),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "guided_decoding": (None,),
}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# Our names and TensorRT-LLM's, of those whose value is passed on as it is.
_TRANSLATED = {**{name: name for name in _PENALTIES}, "min_tokens": "min_tokens", "bad_words": "bad"}


def run_config(
    model: str, speculative: SpeculativeConfig | None, options: Mapping[str, Any], *, dtype: str = "auto"
) -> RunConfig:
    """Options of `LLM(...)` as a file would have them: our names, and TensorRT-LLM's for what we have none for.

    Raises:
        ConfigError: with every option that nobody knows, or whose value is wrong.
    """
    known = {item.name for item in fields(EngineConfig)}
    ours = {name: value for name, value in options.items() if name in known}
    extra = {name: value for name, value in options.items() if name not in known}
    environment = extra.pop("env_overrides", None) or {}
    problems = unknown_key_problems("", extra)
    engine = EngineConfig(model=model)
    try:
        engine = EngineConfig(model=model, dtype=dtype, **ours)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return RunConfig(
        engine=engine,
        speculative=speculative,
        env_overrides=dict(environment),
        extra=extra,
        written=frozenset({*ours, "dtype"}),
    )


def llm_arguments(config: RunConfig) -> dict[str, Any]:
    """What `tensorrt_llm.LLM` is called with, but for the speculative_config, which is an object of its own.

    Limits that nobody wrote are left to TensorRT-LLM.
    """
    arguments: dict[str, Any] = {"model": config.engine.model}
    nested: dict[str, Any] = {}
    for key, name in ENGINE_FIELDS.items():
        section, _, leaf = key.rpartition(".")
        if name in config.written:
            (nested if section else arguments)[leaf] = getattr(config.engine, name)
    extra = dict(config.extra)
    nested |= dict(extra.pop("kv_cache_config", {}))  # type: ignore[call-overload]
    arguments |= extra
    if nested:
        arguments["kv_cache_config"] = nested
    if not config.engine.cuda_graphs:
        arguments["cuda_graph_config"] = None
    if environment := run_environment(config):
        arguments["env_overrides"] = environment
    return arguments


def run_environment(config: RunConfig) -> dict[str, str]:
    """The variables of TensorRT-LLM's processes: the user's, and for a tree those that switch the plugin on."""
    spec = config.speculative
    if spec is None or not spec.is_tree:
        return config.env_overrides
    environment = {**TREE_ENVIRONMENT, LIBRARIES_VARIABLE: _with_library(os.environ.get(LIBRARIES_VARIABLE))}
    return environment | config.env_overrides


def _with_library(libraries: str | None) -> str:
    """A list of attention libraries with ours in it; an exact list stays one."""
    if not libraries:
        return TREE_ENVIRONMENT[LIBRARIES_VARIABLE]
    names = [name.strip() for name in libraries.split(",")]
    if ATTENTION_LIBRARY in (name.removeprefix("+") for name in names):
        return libraries
    is_delta = names[0][:1] in ("+", "-")
    return ",".join([f"+{ATTENTION_LIBRARY}" if is_delta else ATTENTION_LIBRARY, *names])


class TensorRtLlm:
    """A running tensorrt_llm.LLM.

    Args:
        config: what to run.

    Raises:
        HostUnavailableError: TensorRT-LLM is not installed.
        ConfigError, UnsupportedError: with every problem at once.
    """

    def __init__(self, config: RunConfig) -> None:
        if importlib.util.find_spec("tensorrt_llm") is None:
            raise HostUnavailableError(MISSING)
        problems = host_problems(config, "tensorrt_llm") + demo_name_problems(config)
        if config.engine.device == "cpu":
            rule = "TensorRT-LLM runs on GPUs only"
            problems.append(Problem("device", "cpu", rule, "Leave it out, or use host='embedded'."))
        if problems:
            raise ConfigError(problems)
        arguments, spec = llm_arguments(config), config.speculative
        self._speculative = spec
        os.environ.update(run_environment(config))
        self._package = _prepared_package(spec)
        if spec is not None:
            from trtllm_tree.hosts.tensorrt_llm.config import host_config

            arguments["speculative_config"] = host_config(with_features(spec, config.engine.model))
        self.llm: Any = self._package.LLM(**arguments)
        wrapper = self.llm.tokenizer
        # TensorRT-LLM wraps the tokenizer of transformers.
        self.tokenizer: Any = getattr(wrapper, "tokenizer", wrapper)

    def close(self) -> None:
        """End its processes."""
        self.llm.shutdown()

    def run(
        self, prompts: Sequence[str | None], ids: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Serve requests together; one that cannot be served has its `error` set.

        Args:
            prompts: the texts, None for what was no text.
            ids: their tokens.
        """
        # All are handed over before the first is waited for.
        begun = [self._begin(*each) for each in zip(ids, params, strict=True)]
        return [
            _finished(each, prompt, tokens) for each, prompt, tokens in zip(begun, prompts, ids, strict=True)
        ]

    def stream(self, prompt: str | None, ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        """One request, after every step that changed it. Closing the iterator early cancels it.

        Raises:
            RequestError: when it cannot be served, or fails on the way.
        """
        result = self._begin(ids, params)
        if isinstance(result, RequestError):
            raise result
        shown, accept_lens, done = CompletionOutput(), [], False
        try:
            for update in _updates(result):
                output = _output(update, prompt, ids, accept_lens)
                now, done = output.outputs[0], output.finished
                kept = len(now.token_ids) - len(shown.token_ids)
                # The first is the token that prefill predicts; the last may say no more than that it is the last.
                if shown.token_ids and kept:
                    accept_lens.append(kept)
                output.acceptance = AcceptanceStats(list(accept_lens))
                now.text_diff = now.text[len(shown.text) :]
                now.token_ids_diff = now.token_ids[len(shown.token_ids) :]
                shown = now
                yield output
        finally:
            if not done:
                result.abort()

    def _begin(self, ids: list[int], params: SamplingParams) -> Any:
        """TensorRT-LLM's handle of a request, or why there is none."""
        problems = request_problems(params, self._speculative)
        if not ids:
            problems.append(EMPTY_PROMPT)
        if problems:
            return RequestError(problems)
        try:
            translated = self._package.SamplingParams(**sampling_arguments(params))
            return self.llm.generate_async(ids, sampling_params=translated, streaming=True)
        # What TensorRT-LLM raises about one request.
        except (ValueError, RuntimeError) as error:
            return _request_error(error)


def request_problems(params: SamplingParams, speculative: SpeculativeConfig | None) -> list[Problem]:
    """Everything in a request that is wrong, or that is not served with `speculative` (None: plain decoding)."""
    problems = params.validate()
    for name, neutral in _CHECKED.items():
        value = getattr(params, name)
        if value not in neutral and not _is_served(name, params, speculative):
            remedy = f"Leave {name} out, or use host='embedded'."
            problems.append(Problem(name, value, REQUEST_RULE, remedy))
    return problems


def _is_served(name: str, params: SamplingParams, speculative: SpeculativeConfig | None) -> bool:
    """Our worker reads min_p and edits no logits; TensorRT-LLM's chain counts tokens at most, where that is on."""
    if name == "min_p":
        return speculative is None or speculative.is_tree or not params.is_sampled
    if speculative is None:
        return name in _TRANSLATED
    counts = not speculative.is_tree and bool(speculative.host_options.get("enable_penalty"))
    return counts and name in _PENALTIES


def sampling_arguments(params: SamplingParams) -> dict[str, Any]:
    """The arguments of TensorRT-LLM's SamplingParams for a request without `request_problems`."""
    arguments: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "stop": params.stop_strings or None,
        "stop_token_ids": params.stop_token_ids,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
    }
    # Without any of the others a request is greedy there, as here without a temperature.
    if params.is_sampled:
        arguments["temperature"] = params.temperature
        # Older versions take a request without top_p and top_k for a greedy one.
        arguments["top_p"] = 1.0 if params.top_p is None else params.top_p
        arguments["seed"] = secrets.randbits(63) if params.seed is None else params.seed
        arguments |= {"top_k": params.top_k} if params.top_k else {}
        arguments |= {"min_p": params.min_p} if params.min_p else {}
    for name, theirs in _TRANSLATED.items():
        if (value := getattr(params, name)) not in _CHECKED[name]:
            arguments[theirs] = value
    return arguments


def feature_layers(spec: SpeculativeConfig, model: str) -> list[int]:
    """The target layers that the head was trained on, as TensorRT-LLM counts; empty where it needs no telling.

    TensorRT-LLM takes EAGLE3's usual layers unless it is told; it counts layers by their output, heads by their input.
    """
    head, target = Path(spec.speculative_model or ""), Path(model)
    has_head = spec.decoding_type == "Eagle3" and spec.speculative_model is not None
    told = _LAYERS_OPTION in spec.host_options or not has_head
    if told or not all((folder / "config.json").is_file() for folder in (head, target)):
        return []
    try:
        wants, text = (json.loads((folder / "config.json").read_text("utf-8")) for folder in (head, target))
        num_layers = text.get("text_config", text)["num_hidden_layers"]
        layers = sorted(layer - 1 for layer in aux_layer_ids(wants, num_layers))
    # What is wrong with these files is found by other checks.
    except (KeyError, TypeError, ValueError):
        return []
    return [] if layers == [1, num_layers // 2 - 1, num_layers - 4] else layers


def feature_problems(spec: SpeculativeConfig, model: str) -> list[Problem]:
    """What a file lacks of a head's layers: its features would be other ones than it was trained on."""
    if not (layers := feature_layers(spec, model)):
        return []
    option, rule = f"speculative_config.{_LAYERS_OPTION}", f"the head was trained on the outputs of {layers}"
    return [Problem(option, None, rule, f"Set {_LAYERS_OPTION} to {layers}.")]


def with_features(spec: SpeculativeConfig, model: str) -> SpeculativeConfig:
    """`spec` with `feature_layers`, where they have to be told."""
    if not (layers := feature_layers(spec, model)):
        return spec
    nodes = None if spec.is_default_nodes else spec.num_nodes
    options = spec.host_options | {_LAYERS_OPTION: set(layers)}
    return replace(spec, host_options=options, num_nodes=nodes)  # type: ignore[arg-type]


def _prepared_package(spec: SpeculativeConfig | None) -> Any:
    """TensorRT-LLM, with our plugin in it for a tree; what it lacks is reported together."""
    from trtllm_tree.hosts.tensorrt_llm.probe import probe
    from trtllm_tree.hosts.tensorrt_llm.symbols import TREE_FEATURES

    needed = [TREE_FEATURES[spec.decoding_type]] if spec is not None and spec.is_tree else []
    probe().require("llm_api", *needed)
    if spec is not None and spec.is_tree:
        from trtllm_tree.hosts.tensorrt_llm import plugin

        plugin.register(required=True)
    return importlib.import_module("tensorrt_llm")


def _updates(result: Any) -> Iterator[Any]:
    """What TensorRT-LLM reports of a request, step by step; its errors become ours."""
    try:
        yield from result
    except (ValueError, RuntimeError) as error:
        raise _request_error(error) from error


def _finished(result: Any, prompt: str | None, ids: list[int]) -> RequestOutput:
    """Wait for a request."""
    if isinstance(result, RequestError):
        return _refused(result, prompt, ids)
    lengths = []
    try:
        for update in _updates(result):
            lengths.append(len(update.outputs[0].token_ids))
    except RequestError as error:
        return _refused(error, prompt, ids)
    kept = [after - before for before, after in pairwise(lengths)]
    return _output(result, prompt, ids, [length for length in kept if length])


def _output(result: Any, prompt: str | None, ids: list[int], accept_lens: list[int]) -> RequestOutput:
    theirs = result.outputs[0]
    completion = CompletionOutput(
        text=theirs.text,
        token_ids=list(theirs.token_ids),
        finish_reason=theirs.finish_reason,
        stop_reason=theirs.stop_reason,
    )
    return RequestOutput(
        request_id=result.request_id,
        prompt=prompt,
        prompt_token_ids=list(ids),
        outputs=[completion],
        acceptance=AcceptanceStats(list(accept_lens)),
        finished=bool(result.finished),
    )


def _refused(error: RequestError, prompt: str | None, ids: list[int]) -> RequestOutput:
    return RequestOutput(
        request_id=-1,
        prompt=prompt,
        prompt_token_ids=list(ids),
        outputs=[CompletionOutput(finish_reason="error")],
        acceptance=AcceptanceStats(),
        finished=True,
        error=error,
    )


def _request_error(error: Exception) -> RequestError:
    rule = f"TensorRT-LLM does not serve it: {error}"
    return RequestError(Problem("request", type(error).__name__, rule, "Change the request."))
