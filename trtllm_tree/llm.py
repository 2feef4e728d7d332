"""The Python front: `LLM(model, speculative_config=...)`, `generate` and `stream`.

One engine, of either host, serves every call. Prompts are texts, chat messages or token ids; a request that cannot
be served fails alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, overload

from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.host_rules import HOSTS, Host, drafter_problems, host_problems
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.demo import resolve_head, resolve_target
from trtllm_tree.engine.request import Request
from trtllm_tree.errors import ConfigError, Problem, RequestError
from trtllm_tree.hosts.embedded import require_packages
from trtllm_tree.hosts.tensorrt_llm.llm import TensorRtLlm, run_config
from trtllm_tree.hosts.tensorrt_llm.translate import plain_config
from trtllm_tree.outputs import AcceptanceStats, CompletionOutput, RequestOutput

Prompt = str | list[int] | list[dict[str, str]]


class LLM:
    """A model, optionally with a draft tree, on the embedded engine or on TensorRT-LLM.

    Args:
        model: local Hugging Face directory, or "demo" (embedded); on TensorRT-LLM also a name that it downloads.
        speculative_config: None decodes plainly; tree_topk=1 drafts a chain, more a tree. Decoding configs of
            TensorRT-LLM are taken too.
        dtype: "auto", "float32", "bfloat16" or "float16".
        host: "embedded" or "tensorrt_llm".
        engine_options: further fields of `EngineConfig` (max_batch_size, max_seq_len, tokens_per_block, ...); on
            TensorRT-LLM also any argument of its LLM (tensor_parallel_size, kv_cache_config, ...). There, limits
            that are not given are TensorRT-LLM's.

    Raises:
        HostUnavailableError: what the host runs on is not installed.
        ConfigError, UnsupportedError: with every problem at once.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | None = None,
        dtype: str = "auto",
        host: Host = "embedded",
        **engine_options: Any,
    ) -> None:
        if host not in HOSTS:
            rule = f"must be one of {', '.join(HOSTS)}"
            raise ConfigError(Problem("host", host, rule, "Set host to embedded."))
        spec = None if speculative_config is None else plain_config(speculative_config)
        if host == "tensorrt_llm":
            self._serve_on_tensorrt_llm(run_config(model, spec, engine_options, dtype=dtype))
            return
        require_packages()
        config = EngineConfig(model=model, dtype=dtype, **engine_options)
        self.speculative_config = _with_head(model, spec)
        head_dir = None
        if self.speculative_config is not None:
            head_dir = resolve_head(self.speculative_config.speculative_model or "")
        # What it needs of transformers is newer than what TensorRT-LLM brings.
        from trtllm_tree.hosts.embedded.host import build_host

        built = build_host(
            config, self.speculative_config, target_dir=resolve_target(model), head_dir=head_dir
        )
        self.engine, self.tokenizer, self.spec_round = built.engine, built.tokenizer, built.spec_round

    def _serve_on_tensorrt_llm(self, config: RunConfig) -> None:
        self.speculative_config = config.speculative
        self.remote = TensorRtLlm(config)
        self.tokenizer = self.remote.tokenizer

    @classmethod
    def from_config(cls, config: RunConfig, *, host: Host = "embedded") -> LLM:
        """An LLM for a loaded YAML file. Its env_overrides are set in this process, as TensorRT-LLM does.

        Raises:
            ConfigError: also for options of the file that this host cannot honour.
        """
        if host == "tensorrt_llm":
            llm = cls.__new__(cls)
            llm._serve_on_tensorrt_llm(config)
            return llm
        if problems := host_problems(config, "embedded"):
            raise ConfigError(problems)
        os.environ.update(config.env_overrides)
        options = {item.name: getattr(config.engine, item.name) for item in fields(config.engine)}
        return cls(speculative_config=config.speculative, **options)

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

    # An empty list is one prompt of no tokens; only there do the two overlap.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a text, token ids, or chat messages; or a sequence of these.
            sampling_params: one for all, or one a prompt.

        Returns:
            One output for one prompt, else a list in order. In a list, a request that cannot be served has its
            `error` set and finish_reason "error"; the others are served.

        Raises:
            RequestError: a single prompt that cannot be served.
        """
        if _is_single(prompts):
            if isinstance(sampling_params, Sequence):
                rule = "one prompt takes one SamplingParams"
                raise ConfigError(Problem("sampling_params", len(sampling_params), rule, "Pass it alone."))
            output = self._run([prompts], [sampling_params or SamplingParams()])[0]  # type: ignore[list-item]
            if output.error is not None:
                raise output.error
            return output
        many = list(prompts)
        params = sampling_params or SamplingParams()
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            rule = f"one for all prompts, or one for each of the {len(many)}"
            raise ConfigError(Problem("sampling_params", len(each), rule, "Pass a single SamplingParams."))
        return self._run(many, each)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt, yielding the growing output after every step that changed it.

        Closing the iterator early cancels the request.

        Raises:
            RequestError: when the request cannot be served, or fails on the way.
        """
        if "remote" in self.__dict__:
            params = sampling_params or SamplingParams()
            yield from self.remote.stream(_text(prompt), self.encode(prompt), params)
            return
        # Kept, so that an open stream survives `close`.
        engine = self.engine
        request = self._add(prompt, sampling_params or SamplingParams())
        try:
            shown_text, shown_ids = "", 0
            while True:
                while request.finish_reason is None and len(request.output.token_ids) == shown_ids:
                    engine.step()
                output = _output(request, prompt)
                output.outputs[0].text_diff = output.outputs[0].text[len(shown_text) :]
                output.outputs[0].token_ids_diff = output.outputs[0].token_ids[shown_ids:]
                if output.outputs[0].logprobs is not None:
                    output.outputs[0].logprobs_diff = output.outputs[0].logprobs[shown_ids:]
                shown_text, shown_ids = output.outputs[0].text, len(output.outputs[0].token_ids)
                if request.error is not None:
                    raise request.error
                yield output
                if output.finished:
                    return
        finally:
            engine.abort(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the model's chat template."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if prompt and isinstance(prompt[0], dict):
            ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
            return ids["input_ids"]
        return list(prompt)  # type: ignore[arg-type]

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        return self.engine.add_request(self.encode(prompt), params)

    def _run(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        if "remote" in self.__dict__:
            texts, ids = [_text(prompt) for prompt in prompts], [self.encode(prompt) for prompt in prompts]
            return self.remote.run(texts, ids, params)
        requests: list[Request | RequestError] = []
        try:
            for prompt, param in zip(prompts, params, strict=True):
                try:
                    requests.append(self._add(prompt, param))
                except RequestError as error:
                    requests.append(error)
            waiting = [request for request in requests if isinstance(request, Request)]
            while any(request.finish_reason is None for request in waiting):
                self.engine.step()
        finally:
            for request in requests:
                if isinstance(request, Request):
                    self.engine.abort(request)
        return [
            _output(request, prompt) if isinstance(request, Request) else _refused(request, prompt)
            for request, prompt in zip(requests, prompts, strict=True)
        ]


def _is_single(prompts: Any) -> bool:
    """A text, token ids and chat messages are one prompt; so is an empty list of ids."""
    return isinstance(prompts, str) or all(isinstance(item, (int, dict)) for item in prompts)


def _text(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _with_head(model: str, config: SpeculativeConfig | None) -> SpeculativeConfig | None:
    """The demo brings its own head; any other model needs one named."""
    if config is not None and (problems := drafter_problems(config, "embedded")):
        raise ConfigError(problems)
    if config is None or config.speculative_model is not None:
        return config
    if model == "demo":
        nodes = None if config.is_default_nodes else config.num_nodes
        return replace(config, speculative_model="demo", num_nodes=nodes)  # type: ignore[arg-type]
    rule = "speculation needs a draft head"
    raise ConfigError(
        Problem("speculative_model", None, rule, "Name the directory of an EAGLE3 checkpoint for this model.")
    )


def _output(request: Request, prompt: Prompt) -> RequestOutput:
    completion = CompletionOutput(
        text=request.output.text,
        token_ids=list(request.output.token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.output.stop_reason,
    )
    if request.params.logprobs is not None:
        completion.logprobs = list(request.logprobs)
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        completion.cumulative_logprob = sum(entry[token].logprob for token, entry in pairs)
    return RequestOutput(
        request_id=request.request_id,
        prompt=_text(prompt),
        prompt_token_ids=list(request.prompt_ids),
        outputs=[completion],
        acceptance=AcceptanceStats(list(request.accept_lens), request.num_pruned_drafts),
        finished=request.finish_reason is not None,
        error=request.error,
        prompt_logprobs=list(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
    )


def _refused(error: RequestError, prompt: Prompt) -> RequestOutput:
    return RequestOutput(
        request_id=-1,
        prompt=_text(prompt),
        prompt_token_ids=[],
        outputs=[CompletionOutput(finish_reason="error")],
        acceptance=AcceptanceStats(),
        finished=True,
        error=error,
    )
