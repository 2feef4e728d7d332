"""The step loop: admit, prefill or decode, commit. A step's commit is `committed_len += tokens kept`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.tree_rules import is_int
from trtllm_tree.engine.bad_words import bad_word_tokens, edit_problems
from trtllm_tree.engine.chain_attention import PrefillAttention
from trtllm_tree.engine.decode_step import DecodeGraphs, DecodeStep
from trtllm_tree.engine.kv_cache import KVCache
from trtllm_tree.engine.logprobs import token_logprobs
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.engine.output import OutputText
from trtllm_tree.engine.ports import (
    DecodeHook,
    ForwardBatch,
    LogitEditor,
    LogprobReader,
    OutputGrammars,
    Segment,
    TokenDraws,
)
from trtllm_tree.engine.request import Request
from trtllm_tree.engine.scheduler import Scheduler
from trtllm_tree.errors import Problem, RequestError
from trtllm_tree.outputs import TokenLogprobs


class Engine:
    """Continuous batching over one model and one decode hook.

    Args:
        runner: the target model.
        cache: KV pools; the last row of each page table is the pad row.
        hook: owns the decode step.
        draws: choose the tokens behind prompts; the hook's own.
        edits: change the logits before; the hook's own.
        logprobs: read the raw ones; the hook's own.
        grammars: keep outputs within the requests' grammars; None refuses such requests.
        tokenizer: for text and stop strings.
        eos_ids: the model's stop tokens.
        max_batch_size: requests that run at once.
        max_num_tokens: rows of one prefill forward.
        max_seq_len: longest prompt plus output.
        cuda_graphs: replay decode steps as CUDA graphs; needs a CUDA device.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        hook: DecodeHook,
        draws: TokenDraws,
        edits: LogitEditor,
        logprobs: LogprobReader,
        *,
        grammars: OutputGrammars | None = None,
        tokenizer: Any | None,
        eos_ids: Sequence[int],
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        cuda_graphs: bool = False,
    ) -> None:
        self.runner, self.cache, self.hook = runner, cache, hook
        self.max_seq_len = max_seq_len
        self.target_forwards = 0
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._draws, self._edits, self._logprobs, self._grammars = draws, edits, logprobs, grammars
        self._ids = count()
        step = DecodeStep(runner, cache, hook)
        self._decode_step: DecodeStep | DecodeGraphs = step
        if cuda_graphs:
            self._decode_step = DecodeGraphs(
                step, draws, edits, logprobs, max_batch_size=max_batch_size, max_seq_len=max_seq_len
            )
        self._scheduler = Scheduler(cache, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            RequestError: with every reason why it cannot be served.
        """
        problems = params.validate() + self._size_problems(prompt_ids, params)
        if problems:
            raise RequestError(problems)
        stop_ids = [*self._eos_ids, *(params.stop_token_ids or [])]
        bad_words = bad_word_tokens(params, self._tokenizer)
        if problems := edit_problems(params, bad_words, stop_ids, self.runner.config.vocab_size):
            raise RequestError(problems)
        if problems := self._grammar_problems(params):
            raise RequestError(problems)
        params = params.resolved()
        output = OutputText(self._tokenizer, params, self._eos_ids)
        # Kept by the request, so that whatever runs it again repeats it.
        seed = secrets.randbits(64) if params.is_sampled and params.seed is None else params.seed or 0
        request = Request(
            next(self._ids), list(prompt_ids), params, output, seed, stop_ids=stop_ids, bad_words=bad_words
        )
        self._scheduler.add(request, self.hook.max_kv_extent(request.token_limit))
        return request

    def abort(self, request: Request) -> None:
        """End a request that is not finished yet."""
        if request.finish_reason is None:
            request.output.finish("cancelled")
            request.finish_reason = "cancelled"
            self._scheduler.finish(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one forward; returns the requests that changed."""
        for request in self._scheduler.admit():
            assert request.slot is not None, "an admitted request has a slot"
            self.hook.reset(request.slot)
            self._draws.reset(request.slot, request.params, request.seed)
            self._edits.reset(
                request.slot,
                request.params,
                request.prompt_ids,
                stop_ids=request.stop_ids,
                bad_words=request.bad_words,
            )
            self._logprobs.reset(request.slot, request.params.logprobs)
            if self._grammars is not None:
                self._grammars.reset(request.slot, request.params.guided_decoding)
        if plan := self._scheduler.next_prefill():
            return self._prefill(plan)
        if requests := self._scheduler.decoding():
            return self._decode(requests)
        assert not self.has_work, "requests wait for pages that nobody holds"
        return []

    def _size_problems(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Problem]:
        if not prompt_ids:
            return [Problem("prompt", "", "must have at least one token", "Send a non-empty prompt.")]
        problems = []
        vocab = self.runner.config.vocab_size
        if bad := [token for token in prompt_ids if not (is_int(token) and 0 <= token < vocab)]:
            rule = f"token ids must lie in [0, {vocab})"
            problems.append(Problem("prompt", bad[:5], rule, "Tokenise it with this model's tokenizer."))
        if not is_int(params.max_tokens):
            return problems
        limit = len(prompt_ids) + params.max_tokens
        if limit > self.max_seq_len:
            rule = f"prompt ({len(prompt_ids)} tokens) plus max_tokens must be at most max_seq_len = {self.max_seq_len}"
            problems.append(
                Problem("max_tokens", params.max_tokens, rule, "Lower max_tokens or cut the prompt.")
            )
        elif not self._scheduler.fits(self.hook.max_kv_extent(limit)):
            rule = f"prompt plus max_tokens ({limit} tokens, and one verify window) must fit the KV pool"
            remedy = "Lower max_tokens, or raise kv_cache_tokens (in YAML kv_cache_config.max_tokens)."
            problems.append(Problem("max_tokens", params.max_tokens, rule, remedy))
        return problems

    def _grammar_problems(self, params: SamplingParams) -> list[Problem]:
        if params.guided_decoding is None:
            return []
        if self._grammars is None:
            rule, remedy = "this engine follows no grammars", "Leave guided_decoding out."
            return [Problem("guided_decoding", params.guided_decoding, rule, remedy)]
        return self._grammars.check(params.guided_decoding)

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.runner.device)

    def _prefill(self, plan: list[tuple[Request, Segment]]) -> list[Request]:
        segments = [segment for _, segment in plan]
        for segment in segments:
            self.cache.reserve(segment.slot, segment.end)
        ended = [s for s in segments if s.is_last]
        slots = self._tensor([segment.slot for segment in segments])
        tables = tuple(group.page_table[slots] for group in self.cache.groups)
        batch = ForwardBatch(
            token_ids=self._tensor([token for s in segments for token in s.token_ids]),
            positions=self._tensor([position for s in segments for position in range(s.start, s.end)]),
            write_slots=self.segment_slots(segments, tables),
            page_tables=tables,
            attention=PrefillAttention(segments, self.runner.device),
            logit_rows=self._tensor([row for request, s in plan for row in _logit_rows(request, s)]),
        )
        logits = self._keep_prompt_logprobs(plan, self.runner.forward(batch, self.cache))
        last_positions = self._tensor([s.end - 1 for s in ended]).unsqueeze(1)
        ended_slots = [s.slot for s in ended]
        self._draws.plan(ended_slots)
        self._edits.plan(ended_slots)
        self._logprobs.plan(ended_slots)
        if self._grammars is not None:
            self._grammars.fill(ended_slots, 1)
        slots = self._tensor(ended_slots)
        self._logprobs.keep(logits)
        self._edits.apply(logits, slots, None, None, last_positions)
        drawn = self._draws.draw(logits, slots, last_positions)
        wanted = [request.params.logprobs for request, s in plan if s.is_last]
        scored = iter(token_logprobs(self._logprobs.take(None, drawn.unsqueeze(1)), wanted))
        first_tokens = iter(drawn.tolist())
        going_on = []
        for request, segment in plan:
            request.committed_len = segment.end
            if segment.is_last:
                token = next(first_tokens)
                self._commit(request, [token], next(scored))
                segment = replace(segment, next_tokens=(*segment.next_tokens[:-1], token))
            if request.finish_reason is None:
                extent = self.hook.kv_extent(segment.end, request.token_limit)
                self.cache.reserve(segment.slot, extent if segment.is_last else segment.end)
                going_on.append(segment)
        self._edits.commit([(s.slot, s.next_tokens[-1:]) for s in going_on if s.is_last])
        self.hook.after_prefill(going_on)
        return [request for request, segment in plan if segment.is_last]

    def _keep_prompt_logprobs(
        self, plan: list[tuple[Request, Segment]], logits: torch.Tensor
    ) -> torch.Tensor:
        """Score the prompts that want it; returns the rows of `logits` behind which a prompt ends."""
        if all(request.params.prompt_logprobs is None for request, _ in plan):
            return logits
        last_rows, start = [], 0
        for request, segment in plan:
            end = start + len(_logit_rows(request, segment))
            if segment.is_last:
                last_rows.append(end - 1)
            num_top = request.params.prompt_logprobs
            # Nothing of the prompt follows its last token.
            num_scored = segment.length - segment.is_last
            if num_top is not None and num_scored:
                tokens = self._tensor(segment.next_tokens[:num_scored])
                rows = self._logprobs.score(logits[start : start + num_scored], tokens, num_top)
                values, ids, ranks = (tensor.unsqueeze(0) for tensor in rows)
                request.prompt_logprobs += token_logprobs((values, ids, ranks), [num_top])[0]
            start = end
        return logits[self._tensor(last_rows)]

    def segment_slots(
        self, segments: Sequence[Segment], tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Per cache group, the KV slots int32 [T] of the segments' rows, through `tables` [num_segments, pages]."""
        row = self._tensor([index for index, s in enumerate(segments) for _ in s.token_ids])
        position = self._tensor([position for s in segments for position in range(s.start, s.end)])
        slots = []
        for group, table in zip(self.cache.groups, tables, strict=True):
            page = table[row, position // group.page_size]
            slots.append(page * group.page_size + (position % group.page_size).int())
        return tuple(slots)

    def _decode(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            assert request.slot is not None, "a running request has a slot"
            self.cache.reserve(request.slot, self.hook.kv_extent(request.committed_len, request.token_limit))
        slots = [request.slot for request in requests if request.slot is not None]
        self._draws.plan(slots)
        self._edits.plan(slots)
        self._logprobs.plan(slots)
        if self._grammars is not None:
            self._grammars.fill(slots, self.hook.window_len)
        result = self._decode_step.run(slots, [request.committed_len for request in requests])
        self.target_forwards += 1
        tokens, counts = result.tokens.tolist(), result.num_tokens.tolist()
        scored = token_logprobs(result.logprobs, [request.params.logprobs for request in requests])
        for request, row, kept, logprobs in zip(requests, tokens, counts, scored, strict=True):
            request.committed_len += kept
            request.accept_lens.append(self._commit(request, row[:kept], logprobs))
        self._edits.commit(
            [
                (slot, row[:kept])
                for slot, request, row, kept in zip(slots, requests, tokens, counts, strict=True)
                if request.finish_reason is None
            ]
        )
        return requests

    def _commit(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs]) -> int:
        """Append tokens to a request's output, and end it when they do; returns how many were kept."""
        usable = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        allowed = usable
        if self._grammars is not None:
            assert request.slot is not None, "a running request has a slot"
            allowed = usable[: self._grammars.advance(request.slot, usable)]
            request.num_pruned_drafts = self._grammars.num_pruned(request.slot)
        kept = request.output.extend(allowed)
        request.logprobs += logprobs[:kept]
        if request.output.finish_reason is None and len(allowed) < len(usable):
            request.output.finish("error")
            request.error = RequestError(
                Problem(
                    "guided_decoding",
                    request.params.guided_decoding,
                    f"no token behind output token {len(request.output.token_ids)} was allowed by the grammar and"
                    " by the other options",
                    "Leave out min_tokens, bad_words, or what else forbids tokens.",
                )
            )
        elif request.output.finish_reason is None and len(usable) < len(tokens):
            request.output.finish("error")
            request.error = RequestError(
                Problem(
                    "logits",
                    "NaN",
                    f"the model gave no numbers behind output token {len(request.output.token_ids)}",
                    "Check the weights and the dtype; other requests are not affected.",
                )
            )
        request.finish_reason = request.output.finish_reason
        if request.finish_reason is not None:
            self._scheduler.finish(request)
        return kept


def _logit_rows(request: Request, segment: Segment) -> range:
    """Rows of a prefill forward whose logits are looked at."""
    end = segment.row + segment.length
    if request.params.prompt_logprobs is not None:
        return range(segment.row, end)
    return range(end - segment.is_last, end)
