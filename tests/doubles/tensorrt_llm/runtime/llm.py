"""`tensorrt_llm.LLM` over the double's executor, in one thread: whoever waits for a request drives it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .llm_args import TorchLlmArgs
from .sampling_params import SamplingParams

# What the real one gets from the size of the GPU.
_MAX_BATCH, _MAX_SEQ_LEN = 8, 512


@dataclass
class CompletionOutput:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


class RequestOutput:
    """A request on its way; iterating yields itself after every step that added tokens."""

    def __init__(self, llm: LLM, prompt_ids: list[int], params: SamplingParams) -> None:
        self._llm, self._params, self._aborted = llm, params, False
        self.prompt_token_ids, self.outputs, self.finished = prompt_ids, [CompletionOutput()], False
        ends = [] if params.ignore_eos else llm.eos_ids
        self._ends = {*ends, *(params.stop_token_ids or ())}
        self._request = llm.executor.submit(
            prompt_ids, max_tokens=params.max_tokens, end_ids=tuple(self._ends), sampling=params.config()
        )
        self.request_id = self._request.py_request_id + 1

    def __iter__(self) -> Iterator[RequestOutput]:
        while not self.finished:
            before = len(self._request.generated)
            more = self._llm.executor.step()
            if len(self._request.generated) > before or not more:
                self._update()
                yield self

    def result(self, timeout: float | None = None) -> RequestOutput:
        for _ in self:
            pass
        return self

    def abort(self) -> None:
        """Let it end at its next step."""
        self._request.py_max_new_tokens = 0

    def _update(self) -> None:
        output, tokens = self.outputs[0], list(self._request.generated)
        ended = bool(tokens) and tokens[-1] in self._ends
        if ended:
            last = tokens.pop()
            output.stop_reason = None if last in self._llm.eos_ids else last
        skip = self._params.skip_special_tokens
        output.token_ids, output.text = tokens, self._llm.tokenizer.decode(tokens, skip_special_tokens=skip)
        found = next((stop for stop in self._params.stops if stop in output.text), None)
        if found is not None:
            cut = output.text.index(found) + (len(found) if self._params.include_stop_str_in_output else 0)
            output.text, output.stop_reason = output.text[:cut], found
            self.abort()
        full = self._request.state.name == "GENERATION_COMPLETE"
        self.finished = ended or found is not None or full
        if self.finished:
            output.finish_reason = "stop" if ended or found is not None else "length"


class LLM:
    """Validates its arguments as TensorRT-LLM does, and loads the model."""

    def __init__(
        self, model, tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False, trust_remote_code=False,
        tensor_parallel_size=1, dtype="auto", revision=None, tokenizer_revision=None, **kwargs,
    ):  # fmt: skip
        # Before anything is validated, as in the real one.
        os.environ.update(kwargs.get("env_overrides") or {})
        self.args = TorchLlmArgs(
            model=model, tokenizer=tokenizer, tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init, trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size, dtype=dtype, revision=revision,
            tokenizer_revision=tokenizer_revision, **kwargs,
        )  # fmt: skip
        from transformers import AutoTokenizer, GenerationConfig

        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids = self.tokenizer.eos_token_id
        if (Path(model) / "generation_config.json").is_file():
            ids = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
        self.eos_ids = list(ids) if isinstance(ids, list) else [ids]
        self.executor = self._executor()

    def _executor(self) -> Any:
        import torch

        from .executor import Executor

        args, cache = self.args, self.args.kv_cache_config
        graphs = args.cuda_graph_config
        max_batch = min(args.max_batch_size or _MAX_BATCH, _MAX_BATCH)
        executor = Executor(
            args.model, speculative_config=args.speculative_config,
            dtype=None if args.dtype == "auto" else getattr(torch, args.dtype), kv_cache_dtype=cache.dtype,
            kv_manager="v2" if cache.use_kv_cache_manager_v2 else "v1", max_batch_size=max_batch,
            max_seq_len=args.max_seq_len or _MAX_SEQ_LEN, tokens_per_block=cache.tokens_per_block,
            overlap=not args.disable_overlap_scheduler,
            graph_batch_sizes=() if graphs is None else [n for n in graphs.batch_sizes or [] if n <= max_batch],
            attn_backend=args.attn_backend,
        )  # fmt: skip
        executor.warmup()
        return executor

    def generate_async(
        self,
        inputs: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
    ) -> RequestOutput:
        ids = self.tokenizer(inputs)["input_ids"] if isinstance(inputs, str) else list(inputs)
        return RequestOutput(self, ids, sampling_params or SamplingParams())

    def generate(self, inputs: Any, sampling_params: Any = None, use_tqdm: bool = True) -> Any:
        """One output for one prompt, a list for a list."""
        single = isinstance(inputs, str) or not isinstance(inputs[0], str | list)
        prompts = [inputs] if single else list(inputs)
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        begun = [self.generate_async(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        outputs = [output.result() for output in begun]
        return outputs[0] if single else outputs

    def shutdown(self) -> None: ...

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
