"""Where an output ends, and what of it may be shown: decided token by token, whatever runs tokens come in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.engine.output import OutputText

EOS = 2
WAVE = "👋"


class _Fast:
    """As much of a transformers fast tokenizer as OutputText uses."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend


@pytest.fixture(scope="module")
def fallback() -> _Fast:
    """A SentencePiece-like tokenizer: whole words, characters of several bytes, and bytes as fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "!", "日本", "é", WAVE]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _Fast(backend)


def _output(tokenizer: Any, **params: Any) -> OutputText:
    return OutputText(tokenizer, SamplingParams(**{"max_tokens": 100, **params}), [EOS])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def _byte_ids(tokenizer: Any, text: str) -> list[int]:
    """One token a byte: no letter pairs."""
    return [token for char in text for token in _ids(tokenizer, char)]


# Ids alone: which condition ends the output, and at which token.


def test_a_stop_before_the_limit_in_the_same_run_is_a_stop() -> None:
    output = _output(None, max_tokens=5)
    assert output.extend([10, 11, EOS, 20, 21, 22]) == 3
    assert output.token_ids == [10, 11, EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)


def test_a_stop_behind_the_limit_in_the_same_run_is_a_length() -> None:
    output = _output(None, max_tokens=5)
    assert output.extend([10, 11, 20, 21, 22, EOS, 7]) == 5
    assert output.token_ids == [10, 11, 20, 21, 22]
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_a_stop_as_the_last_token_that_the_limit_allows_is_a_stop() -> None:
    output = _output(None, max_tokens=3)
    assert output.extend([10, 11, EOS, 20]) == 3
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)


def test_the_limit_counts_tokens_over_all_runs() -> None:
    output = _output(None, max_tokens=4)
    assert output.extend([5, 6, 7]) == 3
    assert output.finish_reason is None
    assert output.extend([8, 9]) == 1
    assert (output.token_ids, output.finish_reason) == ([5, 6, 7, 8], "length")


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    output = _output(None, ignore_eos=True, stop_token_ids=[30, 31])
    assert output.extend([10, EOS, 11, 31, 30]) == 4
    assert output.token_ids == [10, EOS, 11, 31]
    assert (output.finish_reason, output.stop_reason) == ("stop", 31)


def test_stop_token_ids_and_the_models_own_both_stop() -> None:
    for token in (EOS, 30):
        output = _output(None, stop_token_ids=[30])
        assert output.extend([9, token, 9]) == 2
        assert output.stop_reason == token


# Text.


def test_a_stop_string_inside_a_run_cuts_ids_and_text_at_the_same_token(tiny_tokenizer: Any) -> None:
    ids = _byte_ids(tiny_tokenizer, "one, STOP two")
    output = _output(tiny_tokenizer, stop="STOP", max_tokens=12)
    assert output.extend(ids) == len("one, STOP")
    assert output.token_ids == ids[: len("one, STOP")]
    assert output.text == "one, "
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")


def test_a_stop_string_behind_the_limit_is_never_reached(tiny_tokenizer: Any) -> None:
    ids = _byte_ids(tiny_tokenizer, "one, STOP two")
    for limit in (8, 9):
        output = _output(tiny_tokenizer, stop="STOP", max_tokens=limit)
        assert output.extend(ids) == limit
        # At 9 the stop string ends with the last token that the limit allows.
        assert output.finish_reason == ("length" if limit == 8 else "stop")
        assert output.text == ("one, STO" if limit == 8 else "one, ")


def test_a_stop_string_may_span_tokens_and_runs(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop="ND. T")
    for run in ("the E", "N", "D. ", "The rest"):
        ids = _byte_ids(tiny_tokenizer, run)
        kept = output.extend(ids)
        if output.finish_reason:
            break
        assert kept == len(ids)
    assert (run, kept) == ("The rest", 1)
    assert output.text == "the E"


def test_a_token_that_holds_the_stop_string_and_more_is_cut_inside(tiny_tokenizer: Any) -> None:
    ids = _ids(tiny_tokenizer, "ab")
    assert len(ids) == 1, "the tiny vocabulary has this pair"
    for keep, text in ((False, "x"), (True, "xa")):
        output = _output(tiny_tokenizer, stop="a", include_stop_str_in_output=keep)
        assert output.extend([*_ids(tiny_tokenizer, "x"), *ids, *ids]) == 2
        assert output.text == text


def test_of_two_stop_strings_the_one_that_ends_earliest_wins(tiny_tokenizer: Any) -> None:
    ids = _byte_ids(tiny_tokenizer, "12345678")
    for stops in (["345678", "567"], ["567", "345678"]):
        output = _output(tiny_tokenizer, stop=stops)
        assert output.extend(ids) == 7
        assert (output.stop_reason, output.text) == ("567", "1234")


def test_of_two_stop_strings_in_one_token_the_one_that_ends_earliest_wins(tiny_tokenizer: Any) -> None:
    pair = _ids(tiny_tokenizer, "ab")
    for stops in (["ab", "a"], ["a", "ab"], ["b", "a"]):
        output = _output(tiny_tokenizer, stop=stops)
        output.extend(pair)
        assert (output.stop_reason, output.text) == ("a", "")
    output = _output(tiny_tokenizer, stop=["xab", "a"])
    output.extend([*_ids(tiny_tokenizer, "x"), *pair])
    assert (output.stop_reason, output.text) == ("a", "x")


def test_of_two_stop_strings_that_end_together_the_longer_is_cut(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop=["ST", "ABST"])
    output.extend(_byte_ids(tiny_tokenizer, "xABST"))
    assert (output.stop_reason, output.text) == ("ABST", "x")


def test_include_stop_str_in_output_keeps_the_string_and_nothing_behind_it(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop="##", include_stop_str_in_output=True)
    output.extend(_byte_ids(tiny_tokenizer, "one## two"))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("one##", "stop", 5)


def test_the_stop_token_is_text_only_when_it_is_asked_for(tiny_tokenizer: Any) -> None:
    bang = _ids(tiny_tokenizer, "!")[0]
    for keep, text in ((False, "hi"), (True, "hi!")):
        output = _output(tiny_tokenizer, stop_token_ids=[bang], include_stop_str_in_output=keep)
        output.extend(_byte_ids(tiny_tokenizer, "hi!?"))
        assert (output.text, output.token_ids[-1]) == (text, bang)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_in_the_text_unless_they_are_skipped(tiny_tokenizer: Any, skip: bool) -> None:
    ids = [*_byte_ids(tiny_tokenizer, "a"), 1, *_byte_ids(tiny_tokenizer, "b"), EOS]
    output = _output(
        tiny_tokenizer,
        skip_special_tokens=skip,
        ignore_eos=True,
        max_tokens=4,
        include_stop_str_in_output=True,
    )
    output.extend(ids)
    assert output.token_ids == ids
    assert output.text == ("ab" if skip else "a<|im_start|>b<|im_end|>")


def test_a_stop_string_that_goes_through_a_special_token_is_found_in_the_shown_text(
    tiny_tokenizer: Any,
) -> None:
    output = _output(tiny_tokenizer, stop="xy")
    assert output.extend([*_byte_ids(tiny_tokenizer, "wx"), 1, *_byte_ids(tiny_tokenizer, "yz")]) == 4
    assert output.text == "w"


# Streaming.


def test_a_possible_stop_string_is_held_back_until_it_is_decided(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop=["STOP", "TOM"])
    shown = []
    for char in "a STO SSTOLTOx":
        output.extend(_byte_ids(tiny_tokenizer, char))
        shown.append(output.text)
    decided = ["a", "a ", "a ", "a ", "a ", "a STO ", "a STO ", "a STO S", "a STO S", "a STO S"]
    assert shown == [*decided, "a STO SSTOL", "a STO SSTOL", "a STO SSTOL", "a STO SSTOLTOx"]


def test_what_was_held_back_is_shown_when_the_limit_ends_the_output(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop="STOP", max_tokens=4)
    output.extend(_byte_ids(tiny_tokenizer, "aST"))
    assert output.text == "a"
    output.extend(_byte_ids(tiny_tokenizer, "O"))
    assert (output.text, output.finish_reason) == ("aSTO", "length")


def test_what_was_held_back_is_shown_when_a_stop_token_ends_the_output(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop="STOP")
    output.extend([*_byte_ids(tiny_tokenizer, "aST"), EOS])
    assert (output.text, output.stop_reason) == ("aST", EOS)


def test_what_was_held_back_is_shown_when_the_engine_ends_the_output(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop="STOP")
    output.extend([*_byte_ids(tiny_tokenizer, "aST"), *_byte_ids(tiny_tokenizer, WAVE)[:2]])
    output.finish("cancelled")
    assert (output.text, output.finish_reason, output.stop_reason) == ("aST\ufffd", "cancelled", None)


def test_an_emoji_over_four_tokens_is_shown_whole(tiny_tokenizer: Any) -> None:
    ids = _byte_ids(tiny_tokenizer, f"a{WAVE}b")
    assert len(ids) == 6
    output = _output(tiny_tokenizer)
    shown = []
    for token in ids:
        output.extend([token])
        shown.append(output.text)
    assert shown == ["a", "a", "a", "a", f"a{WAVE}", f"a{WAVE}b"]


def test_an_emoji_is_a_stop_string_like_any_other(tiny_tokenizer: Any) -> None:
    output = _output(tiny_tokenizer, stop=WAVE)
    assert output.extend(_byte_ids(tiny_tokenizer, f"a{WAVE}b")) == 5
    assert (output.text, output.stop_reason) == ("a", WAVE)


def test_an_unfinished_character_is_shown_as_a_replacement_at_the_end(tiny_tokenizer: Any) -> None:
    ids = _byte_ids(tiny_tokenizer, f"a{WAVE}")[:3]
    output = _output(tiny_tokenizer, max_tokens=3)
    output.extend(ids[:2])
    assert output.text == "a"
    output.extend(ids[2:])
    assert output.text == "a\ufffd"


def test_characters_of_several_bytes_come_whole_from_pieces_and_from_bytes(fallback: _Fast) -> None:
    token = fallback.backend_tokenizer.token_to_id
    ids = [token("▁hello"), token("日本"), *(token(f"<0x{byte:02X}>") for byte in WAVE.encode()), token("é")]
    output = _output(fallback)
    shown = []
    for id_ in ids:
        output.extend([id_])
        shown.append(output.text)
    start = " hello日本"
    assert shown == [" hello", start, start, start, start, start + WAVE, start + WAVE + "é"]


def test_invalid_bytes_behind_a_byte_that_was_shown_take_nothing_back(fallback: _Fast) -> None:
    """Byte-fallback decoders turn a whole run of bytes into replacement signs when its end is invalid."""
    token = fallback.backend_tokenizer.token_to_id
    output = _output(fallback, max_tokens=6)
    shown = []
    for piece in ("▁hello", "<0x0A>", "<0xF0>", "<0x9F>", "▁world", "!"):
        output.extend([token(piece)])
        shown.append(output.text)
    assert shown[:4] == [" hello", " hello\n", " hello\n", " hello\n"]
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
    assert output.text.startswith(" hello\n") and output.text.endswith(" world!")


_ALPHABET = [*"abST .", "ab", "é", WAVE]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[str], list[int], dict[str, Any], int]:
    pieces = draw(st.lists(st.sampled_from([*_ALPHABET, "<eos>", "<special>"]), min_size=1, max_size=14))
    params = {
        "max_tokens": draw(st.integers(1, 20)),
        "stop": draw(st.lists(st.text(alphabet="abST é", min_size=1, max_size=4), max_size=3)),
        "stop_token_ids": draw(st.sampled_from([None, [1], [97]])),
        "include_stop_str_in_output": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
    }
    cuts = draw(st.lists(st.integers(0, 30), max_size=6))
    return pieces, sorted(cuts), params, draw(st.integers(0, 3))


def _token_ids(tokenizer: Any, pieces: list[str], drop: int) -> list[int]:
    special = {"<eos>": [EOS], "<special>": [1]}
    ids = [token for piece in pieces for token in special.get(piece) or _ids(tokenizer, piece)]
    # Without its first tokens the output may begin inside a character.
    return ids[drop:] or ids


def _state(output: OutputText) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_runs_of_any_length_give_the_same_output(
    tiny_tokenizer: Any, case: tuple[list[str], list[int], dict[str, Any], int]
) -> None:
    pieces, cuts, params, drop = case
    ids = _token_ids(tiny_tokenizer, pieces, drop)
    whole, parts, single = (_output(tiny_tokenizer, **params) for _ in range(3))
    whole.extend(ids)
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        if parts.finish_reason is None:
            parts.extend(ids[start:end])
    for token in ids:
        if single.finish_reason is None:
            single.extend([token])
    assert _state(whole) == _state(parts) == _state(single)


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_all_is_shown_but_unfinished_characters_and_tails_that_begin_a_stop_string(
    tiny_tokenizer: Any, case: tuple[list[str], list[int], dict[str, Any], int]
) -> None:
    pieces, _, params, drop = case
    output = _output(tiny_tokenizer, **params)
    before = ""
    for token in _token_ids(tiny_tokenizer, pieces, drop):
        output.extend([token])
        assert output.text.startswith(before)
        before = output.text
        if output.finish_reason is not None:
            break
        text = tiny_tokenizer.decode(
            output.token_ids,
            skip_special_tokens=params["skip_special_tokens"],
            clean_up_tokenization_spaces=False,
        )
        text = text.rstrip("\ufffd")
        may_begin = (
            at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in params["stop"])
        )
        assert before == text[: next(may_begin, len(text))]


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_the_end_is_the_first_token_at_which_any_condition_holds(
    tiny_tokenizer: Any, case: tuple[list[str], list[int], dict[str, Any], int]
) -> None:
    """The oracle decodes every beginning of the ids anew, and looks for each condition in it."""
    pieces, _, params, _ = case
    ids = _token_ids(tiny_tokenizer, pieces, 0)
    stop_ids = {*(params["stop_token_ids"] or []), *([] if params["ignore_eos"] else [EOS])}
    keep, skip = params["include_stop_str_in_output"], params["skip_special_tokens"]

    def decode(count: int) -> str:
        return tiny_tokenizer.decode(
            ids[:count], skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )

    expected: tuple[Any, ...] | None = None
    for count, token in enumerate(ids, start=1):
        text = decode(count)
        ends = sorted(
            (text.find(stop) + len(stop), -len(stop), stop) for stop in params["stop"] if stop in text
        )
        if token in stop_ids:
            expected = ids[:count], decode(count if keep else count - 1), "stop", token
        elif ends:
            end, length, stop = ends[0]
            expected = ids[:count], text[: end if keep else end + length], "stop", stop
        elif count == params["max_tokens"]:
            expected = ids[:count], text, "length", None
        if expected is not None:
            break
    output = _output(tiny_tokenizer, **params)
    output.extend(ids)
    assert expected is None or _state(output) == expected
    assert (output.finish_reason is None) == (expected is None)
