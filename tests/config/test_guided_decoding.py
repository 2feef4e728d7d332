"""What can be said about a grammar before it is compiled; and that the schemas let through are held."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_tree.config import host_problems, load_config
from trtllm_tree.config.guided_decoding import GrammarSource, GuidedDecodingParams
from trtllm_tree.config.json_schema_rules import schema_faults

INT: dict[str, Any] = {"type": "integer"}


class Model:
    """Stands for a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return INT


@pytest.mark.parametrize(
    ("options", "option", "rule"),
    [
        ({}, "guided_decoding", "exactly one"),
        ({"regex": "a", "json": INT}, "guided_decoding", "exactly one"),
        ({"json_object": "yes"}, "guided_decoding.json_object", "true or false"),
        ({"regex": ""}, "guided_decoding.regex", "non-empty string"),
        ({"grammar": 3}, "guided_decoding.grammar", "non-empty string"),
        ({"choice": []}, "guided_decoding.choice", "non-empty strings"),
        ({"choice": ["a", ""]}, "guided_decoding.choice", "non-empty strings"),
        ({"choice": "ab"}, "guided_decoding.choice", "non-empty strings"),
        ({"json": "{"}, "guided_decoding.json", "JSON schema"),
        ({"json": 3}, "guided_decoding.json", "JSON schema"),
        ({"json": {"type": "string", "minLength": {1}}}, "guided_decoding.json", "JSON schema"),
        ({"json": {**INT, "not": {"const": 3}}}, "guided_decoding.json", "not is not held"),
        ({"structural_tag": "{}"}, "guided_decoding.structural_tag", "not served"),
    ],
    ids=str,
)
def test_bad_params_are_named(options: dict[str, Any], option: str, rule: str) -> None:
    (problem,) = GuidedDecodingParams(**options).problems()
    assert problem.option == option
    assert rule in problem.rule


def test_equal_grammars_have_one_source() -> None:
    sources = {
        GuidedDecodingParams(json=value).source()
        for value in (INT, json.dumps(INT, indent=2), Model, Model())
    }
    assert sources == {GrammarSource("json", '{"type": "integer"}')}
    assert GuidedDecodingParams(json_object=True).source() == GrammarSource("json_object", "")
    assert GuidedDecodingParams(choice=['a"\\', "\n"]).source().text == 'root ::= "a\\"\\\\" | "\\n"'


@pytest.mark.parametrize(("backend", "is_served"), [("xgrammar", True), ("llguidance", False)])
def test_the_embedded_host_follows_grammars_with_xgrammar_only(
    tmp_path: Path, backend: str, is_served: bool
) -> None:
    file = tmp_path / "demo.yaml"
    file.write_text(f"model: demo\nguided_decoding_backend: {backend}\n")
    problems = host_problems(load_config(file), "embedded")
    assert [problem.option for problem in problems] == ([] if is_served else ["guided_decoding_backend"])
    assert is_served or "xgrammar" in problems[0].remedy


# Expressions, and a text that they do not match and that would be let through.
READ_OTHERWISE = {
    r"\Aab": "Aab",
    r"a$b": "ab",
    r"a^b": "ab",
    r"(a$)b": "ab",
    r"[ab]c(^d)": "acd",
    r"\za": "za",
}


@pytest.mark.parametrize("regex", READ_OTHERWISE)
def test_what_would_be_read_otherwise_in_a_regex_is_refused(regex: str) -> None:
    assert matched(regex, READ_OTHERWISE[regex]), "xgrammar holds it now: serve it"
    (problem,) = GuidedDecodingParams(regex=regex).problems()
    assert problem.option == "guided_decoding.regex"
    assert "position" in problem.rule
    assert schema_faults({"type": "string", "pattern": regex})


# The same for what the JSON reader, which is another one, reads rightly.
MISREAD = {
    r"x[\^]y": "xoy",
    r"[\^a]{3}": "bcd",
    r"[\^-a]": "b",
    r"[\u005ea]": "b",
    r"[\u{5E}a]": "b",
    r"[\x5e-a]": "b",
    r"a|[\^b]": "c",
    r"\x41b": "\u041b",
    r"[\x41b]": "\u041b",
    r"\xzz": "xzz",
    r"\041": "\x0041",
    r"[^]a]": "xa]",
}


@pytest.mark.parametrize("regex", MISREAD)
def test_classes_and_codes_that_would_be_read_otherwise_are_refused(regex: str) -> None:
    assert matched(regex, MISREAD[regex]), "xgrammar holds it now: serve it"
    (problem,) = GuidedDecodingParams(regex=regex).problems()
    assert problem.option == "guided_decoding.regex"
    assert "position" in problem.rule


@pytest.mark.parametrize(
    ("regex", "held", "other"),
    [
        (r"[a\^]", "^", "b"),
        (r"[^\^]", "a", "^"),
        (r"[^\^a]", "b", "a"),
        (r"[\]a]", "]", "\\"),
        (r"[\-a]", "-", "b"),
        (r"[a\-z]", "-", "b"),
        (r"[\]-a]", "_", "b"),
        (r"\^[\\^a]", "^^", "^b"),
        (r"\[\^a", "[^a", "[b"),
        (r"[[\^a]", "^", "b"),
        (r"\x41[\x5d]", "A]", "A\\"),
    ],
)
def test_classes_with_escaped_signs_are_held(regex: str, held: str, other: str) -> None:
    assert GuidedDecodingParams(regex=regex).problems() == []
    assert matched(regex, held)
    assert not matched(regex, other)


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"^ab$", "ab"),
        (r"^a$|^b$", "b"),
        (r"[$^)\]]+\$\^\(", "$^)]$^("),
        (r"\x41\u0042\d\/\-", "AB1/-"),
        (r"(a|(b))\n", "b\n"),
        (r"\w+\s\S", "ab c"),
    ],
)
def test_other_expressions_are_served(regex: str, text: str) -> None:
    assert GuidedDecodingParams(regex=regex).problems() == []
    assert matched(regex, text)


OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": INT, "b": INT}}
# Schemas, and a JSON text that is not valid by them but would be let through: keywords that must be refused.
DROPPED: dict[str, tuple[Any, str]] = {
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, "0.3"),
    "multipleOf in a range": ({**INT, "minimum": 0, "multipleOf": 3}, "4"),
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "items": INT, "contains": {"const": 5}}, "[1]"),
    "not": ({"type": "string", "not": {"const": "a"}}, '"a"'),
    "if": ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    "dependencies": ({**OBJECT, "dependencies": {"a": ["b"]}}, '{"a": 1}'),
    "propertyNames": ({**OBJECT, "propertyNames": {"pattern": "^b$"}}, '{"a": 1}'),
    "minLength beside pattern": ({"type": "string", "pattern": "^a*$", "minLength": 2}, '"a"'),
    "maxLength beside format": ({"type": "string", "format": "date", "maxLength": 2}, '"2020-01-01"'),
    "pattern with a quote": ({"type": "string", "pattern": '"'}, '"""'),
    "pattern with a backslash": ({"type": "string", "pattern": r"\\"}, '"\\"'),
    "pattern with a code": ({"type": "string", "pattern": r"\x22"}, '"""'),
    "pattern with a line break": ({"type": "string", "pattern": r"\n"}, '"\n"'),
    "pattern with a stray bracket": ({"type": "string", "pattern": "].+"}, '"]""'),
    "unknown format": ({"type": "string", "format": "iri"}, '"x y"'),
    "two in allOf": ({"allOf": [{**OBJECT, "required": ["a"]}, {**OBJECT, "required": ["b"]}]}, '{"a": 1}'),
    "oneOf": ({"oneOf": [{**INT, "minimum": 0}, {**INT, "maximum": 5}]}, "3"),
    "anyOf and more": ({**OBJECT, "anyOf": [{"required": ["a"]}]}, "{}"),
    "enum of another type": ({**INT, "enum": ["a", 1]}, '"a"'),
    "enum and minimum": ({**INT, "enum": [1, 7], "minimum": 5}, "1"),
    "const of another type": ({**INT, "const": "a"}, '"a"'),
    "$ref and more": ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INT}}, "1"),
    "$ref to an anchor": ({"$ref": "#x", "$defs": {"x": {**INT, "$anchor": "x"}}}, '"a"'),
    "no type": ({"minimum": 5}, "1"),
    "no type, strings": ({"minLength": 3}, '"b"'),
    "a typing error": ({**INT, "minimun": 5}, "1"),
    "required, undeclared": ({**OBJECT, "required": ["c"]}, '{"a": 1}'),
    "minProperties": (
        {"type": "object", "additionalProperties": INT, "minProperties": 2},
        '{"a": 1, "a": 1}',
    ),
}
# Schemas that are let through, a valid text and an invalid one.
HELD: dict[str, tuple[Any, str, str]] = {
    "numbers": ({**INT, "minimum": -5, "exclusiveMaximum": 13}, "-3", "13"),
    "multiples": ({**INT, "multipleOf": 3}, "12", "13"),
    "strings": ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"a"'),
    "pattern": ({"type": "string", "pattern": "^a+b$"}, '"aab"', '"abc"'),
    "pattern of classes": ({"type": "string", "pattern": r"^[^\"\\]\S.\W$"}, '"a-b!"', '"a"b!"'),
    "pattern with signs": ({"type": "string", "pattern": r"^\[\.\]/\d$"}, '"[.]/1"', '"[a]/1"'),
    "format": ({"type": "string", "format": "date"}, '"2020-01-31"', '"2020"'),
    "arrays": ({"type": "array", "items": INT, "minItems": 2, "maxItems": 3}, "[1, 2]", "[1]"),
    "tuples": (
        {"type": "array", "prefixItems": [INT, {"type": "null"}], "items": False},
        "[1, null]",
        "[1, 2]",
    ),
    "required": ({**OBJECT, "required": ["a"]}, '{"a": 1}', "{}"),
    "properties alone": ({"properties": {"a": INT}, "required": ["a"]}, '{"a": 1}', "1"),
    "additional": ({"type": "object", "additionalProperties": INT}, '{"x": 1}', '{"x": "a"}'),
    "names": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^q$"}},
        '{"q": 1}',
        '{"a": 1}',
    ),
    "at most": (
        {"type": "object", "additionalProperties": INT, "maxProperties": 1},
        '{"q": 1}',
        '{"a": 1, "b": 1}',
    ),
    "enum": ({"type": "string", "enum": ["a", "b"]}, '"b"', '"c"'),
    "const": ({"const": 3}, "3", "4"),
    "anyOf": ({"anyOf": [INT, {"type": "null"}], "title": "x"}, "null", '"a"'),
    "oneOf by type": ({"oneOf": [INT, {"type": "string"}]}, "1", "null"),
    "oneOf by constant": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {
                name: {
                    "type": "object",
                    "properties": {"kind": {"const": name, "type": "string"}, "age": INT},
                    "required": ["kind", "age"],
                }
                for name in ("cat", "dog")
            },
        },
        '{"kind": "dog", "age": 3}',
        '{"kind": "cow", "age": 3}',
    ),
    "recursion": (
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"c": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                    "required": ["c"],
                }
            },
        },
        '{"c": {"c": null}}',
        '{"c": 1}',
    ),
    "annotations": ({**INT, "title": "t", "description": "d", "default": 1, "x-mine": 1}, "1", "null"),
}


def compiler() -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo([chr(byte) for byte in range(128)] + ["</s>"], stop_token_ids=[128])
    return xgrammar.GrammarCompiler(info)


def is_whole(compiled: Any, text: str) -> bool:
    matcher = pytest.importorskip("xgrammar").GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


def held(schema: Any, text: str) -> bool:
    """Whether xgrammar takes `text` for a whole output."""
    return is_whole(compiler().compile_json_schema(json.dumps(schema)), text)


def matched(regex: str, text: str) -> bool:
    return is_whole(compiler().compile_regex(regex), text)


@pytest.mark.parametrize("name", DROPPED)
def test_what_the_grammar_would_drop_is_refused(name: str) -> None:
    schema, invalid = DROPPED[name]
    assert held(schema, invalid), "xgrammar holds it now: serve it"
    assert schema_faults(schema)
    nested = {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}
    assert all(fault.startswith("/properties/deep/items") for fault in schema_faults(nested))


@pytest.mark.parametrize("name", HELD)
def test_what_is_let_through_is_held(name: str) -> None:
    schema, valid, invalid = HELD[name]
    assert schema_faults(schema) == []
    assert held(schema, valid)
    assert not held(schema, invalid)


@pytest.mark.parametrize("name", HELD)
def test_whatever_is_let_through_is_json(name: str) -> None:
    compiled, rng, num_ended = (
        compiler().compile_json_schema(json.dumps(HELD[name][0])),
        random.Random(name),
        0,
    )
    bits, end = np.zeros((1, 5), dtype=np.int32), 128
    for _ in range(20):
        matcher, text = pytest.importorskip("xgrammar").GrammarMatcher(compiled), ""
        for _ in range(80):
            matcher.fill_next_token_bitmask(bits, 0)
            # Control characters are not in the vocabulary that JSON is compiled for.
            legal = [token for token in range(32, 129) if bits[0, token // 32] >> token % 32 & 1]
            token = (
                end
                if end in legal
                else rng.choice([token for token in legal if chr(token) in '"}]'] or legal)
            )
            token = rng.choice(legal) if rng.random() < 0.5 else token
            assert matcher.accept_token(token)
            if matcher.is_terminated():
                num_ended += 1
                json.loads(text)
                break
            text += chr(token)
    assert num_ended
