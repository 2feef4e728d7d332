"""What grammar a request's output has to follow. Must not know torch, and not how grammars are compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from trtllm_tree.config.json_schema_rules import schema_faults
from trtllm_tree.config.option_names import refuse_unknown
from trtllm_tree.config.regex_rules import regex_faults
from trtllm_tree.errors import Problem

_REMEDY = "Mend it, or leave guided_decoding out."


@refuse_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class GuidedDecodingParams:
    """The form of the output, with TensorRT-LLM's and vLLM's names; exactly one is given.

    Args:
        json: a JSON schema: its text, a dict, or a pydantic model.
        json_object: any JSON object or array.
        regex: an expression that the whole output matches; `.` matches line breaks too.
        choice: the output is one of these strings.
        grammar: EBNF whose first rule is called `root`.
        structural_tag: not served; refused.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None

    def problems(self) -> list[Problem]:
        """Every reason why this cannot be served, as far as can be said without compiling it."""
        if not isinstance(self.json_object, bool):
            rule = "must be true or false"
            return [Problem("guided_decoding.json_object", self.json_object, rule, "Set it to true.")]
        given = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(item.name for item in fields(self) if item.name != "structural_tag")
            rule = f"exactly one of {names} must be given"
            return [Problem("guided_decoding", given, rule, "Keep one, or leave guided_decoding out.")]
        name = given[0]
        value = getattr(self, name)
        return [Problem(f"guided_decoding.{name}", value, rule, _REMEDY) for rule in _faults(name, value)]

    def source(self) -> GrammarSource:
        """The grammar of valid params."""
        if self.json is not None:
            return GrammarSource("json", json.dumps(_schema_of(self.json)))
        if self.choice is not None:
            return GrammarSource("grammar", "root ::= " + " | ".join(map(_literal, self.choice)))
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        return GrammarSource("grammar", self.grammar) if self.grammar else GrammarSource("json_object", "")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text: `kind` is json (schema), json_object, regex or grammar (EBNF). Equal ones are the same."""

    kind: str
    text: str


def _faults(name: str, value: Any) -> list[str]:
    if name == "json":
        try:
            schema = _schema_of(value)
            json.dumps(schema, allow_nan=False)
            faults = schema_faults(schema)
        except (TypeError, ValueError, RecursionError) as error:
            return [f"must be a JSON schema ({error})"]
        return [f"the schema must be one that a grammar can hold, and {fault}" for fault in faults]
    if name == "choice":
        strings = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        return [] if strings and value else ["must be a list of non-empty strings"]
    if name == "structural_tag":
        return ["structural tags are not served yet"]
    if name == "json_object":
        return []
    if not isinstance(value, str) or not value:
        return ["must be a non-empty string"]
    return [
        f"must be matched exactly, and {fault}" for fault in (regex_faults(value) if name == "regex" else [])
    ]


def _schema_of(value: Any) -> Any:
    """The schema as JSON values.

    Raises:
        ValueError, TypeError: it is none.
    """
    if isinstance(value, str):
        return json.loads(value)
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if not isinstance(value, (dict, bool)):
        raise TypeError("its text, a dict, or a pydantic model")
    return value


def _literal(text: str) -> str:
    """An EBNF string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
