"""The Python front: `LLM(model, speculative_config=...)`, `generate` and `stream`.

One engine, of either host, serves every call. Prompts are texts, chat messages or token ids; a request that cannot
be served fails alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, overload

from trtllm_tree.config.host_rules import HOSTS, Host, host_problems
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.demo import resolve_head, resolve_target
from trtllm_tree.errors import ConfigError, Problem, RequestError
from trtllm_tree.hosts.embedded import llm as embedded
from trtllm_tree.hosts.embedded import require_packages
from trtllm_tree.hosts.tensorrt_llm.llm import TensorRtLlm
from trtllm_tree.llm_options import in_python_names, read_options
from trtllm_tree.outputs import RequestOutput
from trtllm_tree.prompts import Prompt, ReadPrompt, read_prompt, split_prompts

_CLOSED = Problem("LLM", "closed", "cannot be used after close()", "Make another one.")


class LLM:
    """A model, optionally with a draft tree, on the embedded engine or on TensorRT-LLM.

    Args:
        model: local Hugging Face directory, or "demo" (embedded); on TensorRT-LLM also a name that it downloads.
        speculative_config: None decodes plainly; tree_topk=1 drafts a chain, more a tree. Decoding configs of
            TensorRT-LLM are taken too, and a dict with the keys of a file's section.
        dtype: "auto", "float32", "bfloat16" or "float16".
        host: "embedded" or "tensorrt_llm".
        engine_options: further fields of `EngineConfig` (max_batch_size, max_seq_len, tokens_per_block, ...), and
            any argument of TensorRT-LLM's LLM (tensor_parallel_size, kv_cache_config, ...), which the embedded host
            refuses where it cannot honour it. On TensorRT-LLM limits that are not given are its own.

    Raises:
        HostUnavailableError: what the host runs on is not installed.
        ConfigError, UnsupportedError: with every problem at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        dtype: str = "auto",
        host: Host = "embedded",
        **engine_options: Any,
    ) -> None:
        if host not in HOSTS:
            rule = f"must be one of {', '.join(HOSTS)}"
            raise ConfigError(Problem("host", host, rule, "Set host to embedded."))
        if host == "embedded":
            require_packages()
        config = read_options(model, speculative_config, engine_options, dtype=dtype)
        self._serve(config, host, in_python_names)

    @classmethod
    def from_config(cls, config: RunConfig, *, host: Host = "embedded") -> LLM:
        """An LLM for a loaded YAML file. Its env_overrides are set in this process, as TensorRT-LLM does.

        Raises:
            ConfigError: also for options of the file that this host cannot honour.
        """
        if host == "embedded":
            require_packages()
        llm = cls.__new__(cls)
        llm._serve(config, host, lambda problem: problem)
        return llm

    def _serve(self, config: RunConfig, host: Host, spelled: Callable[[Problem], Problem]) -> None:
        """Start the host; `spelled` words its problems as the user wrote the options."""
        if host == "tensorrt_llm":
            self.speculative_config = config.speculative
            self.remote = TensorRtLlm(config)
            self.tokenizer = self.remote.tokenizer
            return
        if problems := host_problems(config, "embedded"):
            raise ConfigError(map(spelled, problems))
        os.environ.update(config.env_overrides)
        model, spec = config.engine.model, _with_head(config)
        # An MTP layer is the target's own.
        head = None if spec is None or spec.decoding_type == "MTP" else spec.speculative_model or ""
        head_dir = None if head is None else resolve_head(head)
        # What it needs of transformers is newer than what TensorRT-LLM brings.
        from trtllm_tree.hosts.embedded.host import build_host

        built = build_host(config.engine, spec, target_dir=resolve_target(model), head_dir=head_dir)
        self.speculative_config = spec
        self.engine, self.tokenizer, self.spec_round = built.engine, built.tokenizer, built.spec_round

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the engine and its memory, or end TensorRT-LLM's processes. The LLM cannot be used afterwards."""
        if (remote := self.__dict__.pop("remote", None)) is not None:
            remote.close()
        self.__dict__.pop("engine", None)
        self.__dict__.pop("spec_round", None)

    # An empty list is a batch of no prompts; only there do the two overlap.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a text, token ids, chat messages, or a dict with one of the keys `prompt` (a text) and
                `prompt_token_ids`; or an iterable of these.
            sampling_params: one for all, or one a prompt.

        Returns:
            One output for one prompt, else a list in order. In a list, a request that cannot be served has its
            `error` set and finish_reason "error"; the others are served.

        Raises:
            RequestError: a single prompt that cannot be served.
            ConfigError: sampling_params that do not go with the prompts.
        """
        many, is_single = split_prompts(prompts)
        outputs = self._run(many, _params_of_each(sampling_params, len(many), is_single=is_single))
        if not is_single:
            return outputs
        if outputs[0].error is not None:
            raise outputs[0].error
        return outputs[0]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt, yielding the growing output after every step that changed it.

        Closing the iterator early cancels the request.

        Raises:
            RequestError: when the request cannot be served, or fails on the way.
        """
        self._require_open()
        (params,) = _params_of_each(sampling_params, 1, is_single=True)
        read = read_prompt(prompt, self.tokenizer)
        if "remote" in self.__dict__:
            yield from self.remote.stream(read.text, read.token_ids, params)
            return
        # Handed over, so that an open stream survives `close`.
        yield from embedded.stream(self.engine, read.text, read.token_ids, params)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the model's chat template.

        Raises:
            RequestError: it is no prompt of this model's.
        """
        return read_prompt(prompt, self.tokenizer).token_ids

    def _require_open(self) -> None:
        if self.__dict__.keys().isdisjoint(("engine", "remote")):
            raise RequestError(_CLOSED)

    def _run(self, prompts: list[Any], params: list[Any]) -> list[RequestOutput]:
        """Outputs in order; whatever is wrong with one request is in its output."""
        self._require_open()
        read = [self._read(*each) for each in zip(prompts, params, strict=True)]
        good = [
            (each, param) for each, param in zip(read, params, strict=True) if isinstance(each, ReadPrompt)
        ]
        texts, ids = [each.text for each, _ in good], [each.token_ids for each, _ in good]
        options = [param for _, param in good]
        is_remote = "remote" in self.__dict__
        served = iter(
            self.remote.run(texts, ids, options)
            if is_remote
            else embedded.run(self.engine, texts, ids, options)
        )
        return [
            next(served) if isinstance(each, ReadPrompt) else embedded.refused_output(each, _text(prompt))
            for each, prompt in zip(read, prompts, strict=True)
        ]

    def _read(self, prompt: Any, params: Any) -> ReadPrompt | RequestError:
        try:
            read = read_prompt(prompt, self.tokenizer)
        except RequestError as error:
            return error
        if isinstance(params, SamplingParams):
            return read
        return RequestError(_not_params(params))


def _text(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _params_of_each(params: Any, count: int, *, is_single: bool) -> list[Any]:
    """The sampling parameters of `count` prompts; what is wrong with one of them is that request's business.

    Raises:
        ConfigError: another number of them, or no parameters at all.
    """
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise ConfigError(_not_params(params))
    each = list(params)
    if is_single:
        rule = "one prompt takes one SamplingParams"
        raise ConfigError(Problem("sampling_params", len(each), rule, "Pass it alone."))
    if len(each) != count:
        rule = f"one for all prompts, or one for each of the {count}"
        raise ConfigError(Problem("sampling_params", len(each), rule, "Pass a single SamplingParams."))
    return each


def _not_params(value: Any) -> Problem:
    rule = f"must be a SamplingParams, is a {type(value).__name__}"
    return Problem("sampling_params", value, rule, "Pass SamplingParams(max_tokens=...).")


def _with_head(config: RunConfig) -> SpeculativeConfig | None:
    """The demo brings its own head."""
    spec = config.speculative
    is_demo = config.engine.model == "demo"
    if spec is None or spec.speculative_model is not None or spec.decoding_type == "MTP" or not is_demo:
        return spec
    nodes = None if spec.is_default_nodes else spec.num_nodes
    return replace(spec, speculative_model="demo", num_nodes=nodes)  # type: ignore[arg-type]
