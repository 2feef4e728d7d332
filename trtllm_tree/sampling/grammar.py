"""Structured output: which tokens a grammar allows behind every node of a window.

A node's tokens are those that the grammar allows after the request's text and the node's ancestors, so a tree honours
what plain decoding honours. The matcher of a request stands behind its last token (the window's root), walks the
window depth first and comes back; it moves on along the kept tokens only. A node that the grammar forbids is pruned:
its parent's row allows another token, so the walk of the accepted path never enters it. This is work of the host;
batches without a grammar do none of it. Must not know how target tokens are chosen.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trtllm_tree.config.guided_decoding import GrammarSource, GuidedDecodingParams
from trtllm_tree.errors import Problem, RequestError

if TYPE_CHECKING:
    import numpy as np
    import xgrammar

_LOGGER = logging.getLogger(__name__)
_MAX_COMPILED = 128
_UNMASKED = -1


def mask_width(vocab_size: int) -> int:
    """Words int32 of a row that has a bit for every token."""
    return -(-vocab_size // 32)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once.

    Args:
        tokenizer: a transformers fast tokenizer, or None, for which nothing compiles.
        vocab_size: V, logits of a row; may exceed the tokenizer's vocabulary.
        stop_ids: tokens that end an output, the only ones allowed behind a finished grammar.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        # By whether they compile JSON.
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}
        self._compiled: OrderedDict[GrammarSource, xgrammar.CompiledGrammar] = OrderedDict()

    def matcher(self, guided: GuidedDecodingParams) -> xgrammar.GrammarMatcher:
        """A matcher at the start of the grammar of valid params.

        Raises:
            RequestError: the grammar does not compile, or no grammar can be followed here.
        """
        source = guided.source()
        compiler = self._get_compiler(guided, is_json=source.kind in ("json", "json_object"))
        compiled = self._compiled.get(source)
        if compiled is None:
            try:
                compiled = _compile(compiler, source)
            except (RuntimeError, ValueError) as error:
                # The first line names the place in xgrammar's sources.
                reason = str(error).strip().rpartition("] ")[2].split(": ", 1)[-1].partition("\n")[0]
                raise _refusal(guided, f"does not compile ({reason})", "Mend the grammar.") from error
            self._compiled[source] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        import xgrammar

        return xgrammar.GrammarMatcher(compiled)

    def _get_compiler(self, guided: GuidedDecodingParams, *, is_json: bool) -> xgrammar.GrammarCompiler:
        if is_json in self._compilers:
            return self._compilers[is_json]
        if self._tokenizer is None:
            raise _refusal(guided, "needs the model's tokenizer", "Leave guided_decoding out.")
        if not self._stop_ids:
            raise _refusal(guided, "needs a model with an end token", "Leave guided_decoding out.")
        try:
            import xgrammar
        except ImportError as error:
            remedy = "Install it: pip install 'trtllm_tree[grammar]'."
            raise _refusal(guided, "needs the package xgrammar", remedy) from error
        try:
            info = _tokenizer_info(self._tokenizer, self._vocab_size, self._stop_ids, is_json=is_json)
        except (RuntimeError, ValueError) as error:
            rule = f"needs a tokenizer that xgrammar reads ({error})"
            raise _refusal(guided, rule, "Leave guided_decoding out.") from error
        # Kept by source here, so that a request costs no second look into its text.
        self._compilers[is_json] = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return self._compilers[is_json]


def _refusal(guided: GuidedDecodingParams, rule: str, remedy: str) -> RequestError:
    kinds = ("json", "regex", "choice", "grammar")
    kind = next((name for name in kinds if getattr(guided, name) is not None), "json_object")
    return RequestError(Problem(f"guided_decoding.{kind}", getattr(guided, kind), rule, remedy))


def _compile(compiler: xgrammar.GrammarCompiler, source: GrammarSource) -> xgrammar.CompiledGrammar:
    if source.kind == "json":
        return compiler.compile_json_schema(source.text)
    if source.kind == "regex":
        return compiler.compile_regex(source.text)
    if source.kind == "grammar":
        return compiler.compile_grammar(source.text)
    return compiler.compile_builtin_json_grammar()


def _tokenizer_info(
    tokenizer: Any, vocab_size: int, stop_ids: list[int], *, is_json: bool
) -> xgrammar.TokenizerInfo:
    """The vocabulary without special tokens: they are left out of the text, which alone follows the grammar.

    JSON also goes without tokens that hold control characters. None may stand in a string, but xgrammar lets all but
    line breaks into strings of limited length; outside of strings they are white space at most.
    """
    import xgrammar

    read = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    vocab, decoded = [""] * vocab_size, read.decoded_vocab
    special = {
        index
        for index, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in special:
            has_control = any(byte < 32 and byte not in b"\r\n" for byte in decoded[index])
            vocab[index] = "" if is_json and has_control else token
    return xgrammar.TokenizerInfo(
        vocab,
        vocab_type=read.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stop_ids,
        add_prefix_space=read.add_prefix_space,
    )


def fill_window_masks(
    matcher: xgrammar.GrammarMatcher, tokens: Sequence[int], parents: Sequence[int], rows: torch.Tensor
) -> int:
    """Fill every node's mask from the grammar's state behind the node. The matcher comes back to where it stood.

    Args:
        matcher: behind the root's token, and not terminated.
        tokens: [N], the window's tokens, root first.
        parents: [N], root -1, a parent's index below its child's.
        rows: int32 [N, words] on the CPU, bit t of row i set when token t may follow node i. Rows of pruned nodes,
            and of those behind which the grammar has ended, are all ones.

    Returns:
        Pruned nodes: those that the grammar forbids, and their descendants.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    rows.fill_(_UNMASKED)
    # torch says of pinned memory that it is not the CPU's.
    words = rows.numpy()
    matcher.fill_next_token_bitmask(words, 0)
    allowed, path = 1, [iter(children[0])]
    while path:
        node = next(path[-1], None)
        if node is None:
            path.pop()
            if path:
                matcher.rollback(1)
        # By the mask first: xgrammar prints a line for every special token that it is asked about.
        elif _has_bit(words[parents[node]], tokens[node]) and matcher.accept_token(tokens[node]):
            allowed += 1
            if matcher.is_terminated():
                matcher.rollback(1)
            else:
                matcher.fill_next_token_bitmask(words, node)
                path.append(iter(children[node]))
    return len(tokens) - allowed


def _has_bit(words: np.ndarray, token: int) -> bool:
    return token >= 0 and bool(words[token // 32] >> (token % 32) & 1)


@dataclass
class _State:
    """A request's matcher, what it has pruned, and why it cannot go on."""

    matcher: xgrammar.GrammarMatcher
    num_pruned: int = 0
    failure: RuntimeError | None = None

    def accepts(self, token: int) -> bool:
        """Moves the matcher over `token`, if the grammar allows it."""
        try:
            return (
                self.failure is None and not self.matcher.is_terminated() and self.matcher.accept_token(token)
            )
        except RuntimeError as error:
            _LOGGER.error("the grammar of a request failed, which ends it: %s", error)
            self.failure = error
            return False


# Tokens [B][N] and parents [B][N] (None for chains) of the windows that pool slots [B] will verify next.
ReadWindows = Callable[[Sequence[int]], tuple[list[list[int]], list[list[int]] | None]]


class Bitmask(Protocol):
    """Where the masks go: `LogitEdits`."""

    @property
    def bitmask(self) -> torch.Tensor:
        """int32 [max_rows, words] on the device; row i of the b-th request of the next step is row b * R + i."""
        ...

    def use_bitmask(self, slot: int, used: bool) -> None:
        """Whether the rows of `slot` obey it."""
        ...


class SlotGrammars:
    """The grammars of an engine's pool slots.

    Args:
        compiler: of the engine's tokenizer.
        edits: apply the masks.
        read_windows: reads what was drafted; None without speculation. It waits for the device.
    """

    def __init__(
        self, compiler: GrammarCompiler, edits: Bitmask, read_windows: ReadWindows | None = None
    ) -> None:
        self._compiler, self._edits, self._read_windows = compiler, edits, read_windows
        self._rows: torch.Tensor | None = None
        self._states: dict[int, _State] = {}

    def check(self, guided: GuidedDecodingParams) -> list[Problem]:
        """Compiles the grammar of valid params; why it cannot be followed, or nothing."""
        try:
            self._compiler.matcher(guided)
        except RequestError as error:
            return list(error.problems)
        return []

    def reset(self, slot: int, guided: GuidedDecodingParams | None) -> None:
        """A request takes pool slot `slot`; its grammar, if it has one, passed `check`."""
        self._edits.use_bitmask(slot, guided is not None)
        if guided is None:
            self._states.pop(slot, None)
        else:
            self._states[slot] = _State(self._compiler.matcher(guided))

    def fill(self, slots: Sequence[int], num_rows: int) -> None:
        """Fill the masks of the next step: R = `num_rows` rows a request, one behind a prompt and in plain decoding.

        A request whose matcher fails is left unmasked, and `advance` ends it.
        """
        governed = [(index, slot) for index, slot in enumerate(slots) if slot in self._states]
        if not governed:
            return
        tokens, parents = [[0]] * len(governed), None
        if num_rows > 1:
            assert self._read_windows is not None, "a window of several rows without speculation"
            tokens, parents = self._read_windows([slot for _, slot in governed])
        bitmask, chain = self._edits.bitmask, range(-1, num_rows - 1)
        if self._rows is None:
            pinned = bitmask.device.type == "cuda"
            self._rows = torch.full(bitmask.shape, _UNMASKED, dtype=torch.int32, pin_memory=pinned)
        for place, (index, slot) in enumerate(governed):
            state, rows = self._states[slot], self._rows[index * num_rows : (index + 1) * num_rows]
            try:
                state.num_pruned += fill_window_masks(
                    state.matcher, tokens[place], chain if parents is None else parents[place], rows
                )
            except RuntimeError as error:
                _LOGGER.error("the grammar of a request failed, which ends it: %s", error)
                state.failure = error
                rows.fill_(_UNMASKED)
        used = len(slots) * num_rows
        bitmask[:used].copy_(self._rows[:used])

    def advance(self, slot: int, tokens: Sequence[int]) -> int:
        """Move the matcher of `slot` along kept tokens; returns how many of them its grammar allows.

        Tokens behind the one that ends the grammar are not allowed. Without a grammar all are.
        """
        state = self._states.get(slot)
        if state is None:
            return len(tokens)
        num_allowed = 0
        while num_allowed < len(tokens) and state.accepts(tokens[num_allowed]):
            num_allowed += 1
        return num_allowed

    def num_pruned(self, slot: int) -> int:
        """Drafted nodes that the grammar of `slot` forbade so far."""
        state = self._states.get(slot)
        return 0 if state is None else state.num_pruned
