"""Requests through the embedded engine, its results in our shapes. Must not know how prompts become token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.engine.request import Request
from trtllm_tree.errors import RequestError
from trtllm_tree.outputs import AcceptanceStats, CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from trtllm_tree.engine.engine import Engine


def run(
    engine: Engine, prompts: Sequence[str | None], ids: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Serve requests together; one that cannot be served has its `error` set.

    Args:
        prompts: the texts, None for what was no text.
        ids: their tokens.
    """
    requests: list[Request | RequestError] = []
    try:
        for tokens, options in zip(ids, params, strict=True):
            try:
                requests.append(engine.add_request(tokens, options))
            except RequestError as error:
                requests.append(error)
        waiting = [request for request in requests if isinstance(request, Request)]
        while any(request.finish_reason is None for request in waiting):
            engine.step()
    finally:
        for request in requests:
            if isinstance(request, Request):
                engine.abort(request)
    return [
        _output(request, prompt) if isinstance(request, Request) else refused_output(request, prompt)
        for request, prompt in zip(requests, prompts, strict=True)
    ]


def stream(
    engine: Engine, prompt: str | None, ids: list[int], params: SamplingParams
) -> Iterator[RequestOutput]:
    """One request, after every step that changed it. Closing the iterator early cancels it.

    Raises:
        RequestError: when it cannot be served, or fails on the way.
    """
    request = engine.add_request(ids, params)
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


def refused_output(error: RequestError, prompt: str | None) -> RequestOutput:
    """The output of a request that never ran."""
    return RequestOutput(
        request_id=-1,
        prompt=prompt,
        prompt_token_ids=[],
        outputs=[CompletionOutput(finish_reason="error")],
        acceptance=AcceptanceStats(),
        finished=True,
        error=error,
    )


def _output(request: Request, prompt: str | None) -> RequestOutput:
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
        prompt=prompt,
        prompt_token_ids=list(request.prompt_ids),
        outputs=[completion],
        acceptance=AcceptanceStats(list(request.accept_lens), request.num_pruned_drafts),
        finished=request.finish_reason is not None,
        error=request.error,
        prompt_logprobs=list(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
    )
