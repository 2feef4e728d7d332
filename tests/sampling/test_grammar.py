"""Per-node bitmasks of a grammar, against a matcher that replays every path from the root."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from trtllm_tree import GuidedDecodingParams
from trtllm_tree.errors import RequestError
from trtllm_tree.sampling.grammar import GrammarCompiler, SlotGrammars, fill_window_masks, mask_width

xgrammar = pytest.importorskip("xgrammar")

# Letters, pieces of JSON, tokens that begin others, a special token and the end.
PIECES = [*'abc01{}[]":, ', "ab", "bc", "abc", '{"', '":', '",', "10", "</s>", "<pad>"]
END, PAD = PIECES.index("</s>"), PIECES.index("<pad>")
VOCAB = 40  # logits of a row, more than there are pieces
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["ab", "abc"]}}},
    "required": ["a"],
}
GUIDES = {
    "regex": GuidedDecodingParams(regex="(ab|bc)*[01]{1,3}"),
    "choice": GuidedDecodingParams(choice=["abc", "ab", "bca"]),
    "json": GuidedDecodingParams(json=SCHEMA),
    "json_object": GuidedDecodingParams(json_object=True),
    "grammar": GuidedDecodingParams(grammar='root ::= "[" root "]" | "a" | "b"'),
}


def compiler(*more_pieces: str) -> GrammarCompiler:
    pieces = [*PIECES, *more_pieces]
    model = WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="</s>", pad_token="<pad>"
    )
    return GrammarCompiler(tokenizer, VOCAB, [END])


def allowed(row: torch.Tensor) -> set[int]:
    return {token for token in range(VOCAB) if row[token // 32].item() >> token % 32 & 1}


def replayed(guided: GuidedDecodingParams, tokens: Sequence[int]) -> set[int] | None:
    """Tokens that the grammar allows after `tokens`, of a fresh matcher; None when it forbids them or has ended."""
    matcher = compiler().matcher(guided)
    if not all(matcher.accept_token(token) for token in tokens) or matcher.is_terminated():
        return None
    row = torch.zeros(1, mask_width(VOCAB), dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    return allowed(row[0])


def text(guided: GuidedDecodingParams, length: int, rng: random.Random) -> list[int]:
    """A legal beginning of at most `length` tokens, without the end token."""
    tokens: list[int] = []
    while len(tokens) < length and (legal := (replayed(guided, tokens) or set()) - {END}):
        tokens.append(rng.choice(sorted(legal)))
    return tokens


def drafted_tree(
    guided: GuidedDecodingParams, before: list[int], num_nodes: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """A random tree behind `before` in which about half of the nodes is what the grammar allows."""
    tokens, parents, paths = [before[-1] if before else 0], [-1], [before]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens))
        legal = replayed(guided, paths[parent])
        token = rng.choice(sorted(legal)) if legal and rng.random() < 0.7 else rng.randrange(len(PIECES))
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return tokens, parents


def path_of(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Tokens from the root's first child to `node`."""
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def test_a_drafted_special_token_is_pruned_without_a_line_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    matcher = compiler().matcher(GUIDES["choice"])
    rows = torch.zeros(4, mask_width(VOCAB), dtype=torch.int32)
    a, b = PIECES.index("a"), PIECES.index("b")
    assert fill_window_masks(matcher, [0, PAD, a, b], [-1, 0, 0, 2], rows) == 1
    assert "special token" not in capfd.readouterr().err
    assert not matcher.accept_token(PAD)
    assert "special token" in capfd.readouterr().err, (
        "xgrammar is silent now: the mask need not be asked first"
    )


@pytest.mark.parametrize("kind", GUIDES)
def test_every_nodes_mask_is_the_grammars_after_its_ancestors_and_the_matcher_comes_back(kind: str) -> None:
    guided, rng = GUIDES[kind], random.Random(kind)
    num_pruned, num_ended = 0, 0
    for _ in range(20):
        before = text(guided, rng.randrange(6), rng)
        tokens, parents = drafted_tree(guided, before, 24, rng)
        matcher = compiler().matcher(guided)
        assert all(matcher.accept_token(token) for token in before)
        rows = torch.full((24, mask_width(VOCAB)), 12345, dtype=torch.int32)
        pruned = fill_window_masks(matcher, tokens, parents, rows)
        expected = [replayed(guided, before + path_of(node, tokens, parents)) for node in range(24)]
        for row, legal in zip(rows, expected, strict=True):
            assert allowed(row) == (set(range(VOCAB)) if legal is None else legal)
        # A node is legal when its parent's tokens hold it; one that ends the grammar has no mask of its own.
        legal_nodes = [node for node in range(1, 24) if tokens[node] in (expected[parents[node]] or set())]
        assert pruned == 23 - len(legal_nodes)
        num_pruned += pruned
        num_ended += sum(tokens[node] == END for node in legal_nodes)
        # It stands where it stood: behind `before`, in every later token too.
        row = torch.zeros(1, mask_width(VOCAB), dtype=torch.int32)
        matcher.fill_next_token_bitmask(row, 0)
        assert allowed(row[0]) == replayed(guided, before)
        if before:
            matcher.rollback(len(before))
            matcher.fill_next_token_bitmask(row, 0)
            assert allowed(row[0]) == replayed(guided, [])
    assert num_pruned > 50
    assert num_ended > 0 or kind == "json"


def test_one_legal_token_per_position_allows_no_sibling() -> None:
    guided = GuidedDecodingParams(choice=["a0b1c"])
    path = [PIECES.index(piece) for piece in "a0b1c"] + [END]
    # Behind the root and behind each node of the path hang the right token and a wrong one, right first or second.
    tokens, parents, last = [PIECES.index(" ")], [-1], 0
    for depth, token in enumerate(path):
        pair = [token, PIECES.index(",")]
        for each in pair if depth % 2 else pair[::-1]:
            tokens.append(each)
            parents.append(last)
        last = len(tokens) - (1 if tokens[-1] == token else 2)
    rows = torch.zeros(len(tokens), mask_width(VOCAB), dtype=torch.int32)
    assert fill_window_masks(compiler().matcher(guided), tokens, parents, rows) == len(path)
    node, seen = 0, []
    while (legal := allowed(rows[node])) != set(range(VOCAB)):
        assert len(legal) == 1
        seen += legal
        node = next(
            child
            for child in range(node + 1, len(tokens))
            if parents[child] == node and tokens[child] in legal
        )
    assert seen == path


def test_special_tokens_and_ids_without_a_token_are_never_allowed() -> None:
    legal = replayed(GuidedDecodingParams(regex=r"[^x]*"), [])
    assert legal == set(range(len(PIECES))) - {PAD}


def test_control_characters_come_into_no_json_string() -> None:
    tab, mixed, line = range(len(PIECES), len(PIECES) + 3)
    row = torch.zeros(1, mask_width(VOCAB), dtype=torch.int32)
    for guided, begin, legal in (
        (GuidedDecodingParams(json={"type": "string", "maxLength": 4}), '"', set()),
        (GuidedDecodingParams(json={"type": "string"}), '"', set()),
        (GuidedDecodingParams(json_object=True), "{", {line}),
        (GuidedDecodingParams(regex='"[^x]*"'), '"', {tab, mixed, line}),
    ):
        matcher = compiler("\t", "a\x01", "\n").matcher(guided)
        assert matcher.accept_token(PIECES.index(begin))
        matcher.fill_next_token_bitmask(row, 0)
        assert allowed(row[0]) & {tab, mixed, line} == legal


@dataclass
class Masks:
    """Stands for the edits."""

    bitmask: torch.Tensor
    used: dict[int, bool] = field(default_factory=dict)

    def use_bitmask(self, slot: int, used: bool) -> None:
        self.used[slot] = used


def masks(num_rows: int) -> Masks:
    return Masks(torch.full((num_rows, mask_width(VOCAB)), -1, dtype=torch.int32))


def test_a_batch_fills_the_rows_of_its_governed_slots_each_from_its_own_window() -> None:
    edits, rng = masks(12), random.Random(0)
    windows = {slot: drafted_tree(GUIDES[kind], [], 4, rng) for slot, kind in ((5, "regex"), (2, "choice"))}
    grammars = SlotGrammars(
        compiler(), edits, lambda slots: ([windows[s][0] for s in slots], [windows[s][1] for s in slots])
    )
    grammars.reset(5, GUIDES["regex"])
    grammars.reset(3, None)
    grammars.reset(2, GUIDES["choice"])
    assert edits.used == {5: True, 3: False, 2: True}
    grammars.fill([5, 3, 2], 4)
    for index, slot, kind in ((0, 5, "regex"), (2, 2, "choice")):
        tokens, parents = windows[slot]
        for node in range(4):
            legal = replayed(GUIDES[kind], path_of(node, tokens, parents))
            row = edits.bitmask[index * 4 + node]
            assert allowed(row) == (set(range(VOCAB)) if legal is None else legal)
    assert (edits.bitmask[4:8] == -1).all()
    pruned = grammars.num_pruned(5) + grammars.num_pruned(2)
    assert pruned > 0
    assert grammars.num_pruned(3) == 0
    # One row a request, another order: behind the prompt.
    grammars.fill([3, 2], 1)
    assert allowed(edits.bitmask[1]) == replayed(GUIDES["choice"], [])
    assert grammars.num_pruned(5) + grammars.num_pruned(2) == pruned


def test_a_matcher_moves_along_allowed_tokens_and_stops_where_the_grammar_ends() -> None:
    grammars = SlotGrammars(compiler(), masks(1))
    grammars.reset(0, GuidedDecodingParams(choice=["ab"]))
    a, b, c = (PIECES.index(piece) for piece in "abc")
    assert grammars.advance(0, [a]) == 1
    assert grammars.advance(0, [b, END, c]) == 2
    assert grammars.advance(0, [END]) == 0
    grammars.reset(0, GuidedDecodingParams(choice=["ab"]))
    assert grammars.advance(0, [a, c, b]) == 1
    grammars.reset(0, None)
    assert grammars.advance(0, [c, PAD]) == 2


def test_a_matcher_that_fails_stops_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = masks(2)
    grammars = SlotGrammars(compiler(), edits)
    for slot in (0, 1):
        grammars.reset(slot, GuidedDecodingParams(choice=["ab"]))
    a, b = PIECES.index("a"), PIECES.index("b")
    # A terminated matcher raises when it is asked for a mask.
    assert grammars.advance(0, [a, b, END]) == 3
    grammars.fill([0, 1], 1)
    assert allowed(edits.bitmask[0]) == set(range(VOCAB))
    assert allowed(edits.bitmask[1]) == replayed(GuidedDecodingParams(choice=["ab"]), [])
    assert grammars.advance(0, [a]) == 0
    assert grammars.advance(1, [a, b]) == 2


def test_equal_grammars_are_compiled_once() -> None:
    shared = compiler()
    shared.matcher(GuidedDecodingParams(json=SCHEMA))
    shared.matcher(GuidedDecodingParams(json=json.dumps(SCHEMA)))
    shared.matcher(GuidedDecodingParams(regex="a"))
    assert len(shared._compiled) == 2


@pytest.mark.parametrize(
    ("guided", "names"),
    [
        (GuidedDecodingParams(regex="a("), ("guided_decoding.regex", "parenthesis")),
        (GuidedDecodingParams(regex=r"(a)\1"), ("guided_decoding.regex", "Backreference")),
        (GuidedDecodingParams(grammar="start ::= 'a'"), ("guided_decoding.grammar",)),
        (
            GuidedDecodingParams(json={"type": "integer", "minimum": 1.5}),
            ("guided_decoding.json", "whole number"),
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(
    guided: GuidedDecodingParams, names: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as error:
        compiler().matcher(guided)
    assert "does not compile (" in str(error.value)
    for name in names:
        assert name in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"xgrammar.*trtllm_tree\[grammar\]"):
        compiler().matcher(GuidedDecodingParams(regex="a"))


def test_no_tokenizer_and_no_end_token_are_refused() -> None:
    guided = GuidedDecodingParams(regex="a")
    for broken in (GrammarCompiler(None, VOCAB, [END]), GrammarCompiler(object(), VOCAB, [])):
        with pytest.raises(RequestError, match=r"guided_decoding\.regex"):
            broken.matcher(guided)
