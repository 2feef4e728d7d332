"""Which JSON schemas constrain an output exactly.

xgrammar drops what a context-free grammar cannot say, with a line on stderr or none. A schema that uses such a
keyword is refused by the keyword's name, so that an output that ends by its grammar is always valid by its schema.
The lists were found by trying each keyword on xgrammar 0.2.9. Must not know xgrammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trtllm_tree.config.regex_rules import json_pattern_faults
from trtllm_tree.config.tree_rules import is_int

# They say nothing about which values are valid.
_ANNOTATIONS = frozenset(
    (
        *(
            "$schema",
            "$id",
            "$comment",
            "$defs",
            "definitions",
            "title",
            "description",
            "default",
            "examples",
        ),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_STRINGS = frozenset(("pattern", "format", "minLength", "maxLength"))
_ARRAYS = frozenset(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"))
_OBJECTS = frozenset(
    (
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    )
)
_TYPES_OF = (
    (_NUMBERS, ("integer", "number")),
    (_STRINGS, ("string",)),
    (_ARRAYS, ("array",)),
    (_OBJECTS, ("object",)),
)
# A schema that has one of them is described by it alone.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# Of each pair the second is dropped, or loses its meaning.
_APART = (
    ("minimum", "multipleOf"),
    ("maximum", "multipleOf"),
    ("exclusiveMinimum", "multipleOf"),
    ("exclusiveMaximum", "multipleOf"),
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("pattern", "format"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("properties", "propertyNames"),
    ("properties", "patternProperties"),
    ("additionalProperties", "minProperties"),
    ("patternProperties", "minProperties"),
    ("propertyNames", "minProperties"),
)
_FORMATS = frozenset(
    (
        *(
            "date",
            "time",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uri",
            "uri-reference",
        ),
        *("uri-template", "uuid", "json-pointer", "relative-json-pointer"),
    )
)
_IS_TYPE = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": is_int,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


# Keywords that hold subschemas by name, and in lists.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_FORMS: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (_NAMED, "an object", lambda value: isinstance(value, dict)),
    ((*_LISTED, "enum"), "a list that is not empty", lambda value: isinstance(value, list) and bool(value)),
    (("pattern", "format", "$ref"), "a string", lambda value: isinstance(value, str)),
    (
        ("required",),
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    (
        ("type",),
        f"one of {', '.join(_IS_TYPE)}, or a list of them",
        lambda value: (
            value != []
            and all(
                isinstance(name, str) and name in _IS_TYPE
                for name in (value if isinstance(value, list) else [value])
            )
        ),
    ),
)


def schema_faults(schema: object) -> list[str]:
    """What of a JSON schema would not be held, each with the place where it stands; empty if all of it would."""
    return [f"{where or '/'}: {fault}" for where, fault in _faults(schema, "", schema)]


def _faults(schema: object, where: str, root: object) -> Iterator[tuple[str, str]]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield where, "a schema is an object, true or false"
        return
    if wrong_forms := list(_form_faults(schema)):
        for fault in wrong_forms:
            yield where, fault
        return
    for fault in _own_faults(schema, root):
        yield where, fault
    for key in (
        "items",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ):
        if key in schema:
            yield from _faults(schema[key], f"{where}/{key}", root)
    for key in _NAMED:
        for name, each in schema.get(key, {}).items():
            yield from _faults(each, f"{where}/{key}/{name}", root)
    for key in _LISTED:
        for index, each in enumerate(schema.get(key, [])):
            yield from _faults(each, f"{where}/{key}/{index}", root)


def _form_faults(schema: dict[str, Any]) -> Iterator[str]:
    """Values of another form than the rules below can read."""
    for keys, form, has_form in _FORMS:
        for key in keys:
            if key in schema and not has_form(schema[key]):
                yield f"{key} must be {form}"


def _own_faults(schema: dict[str, Any], root: object) -> Iterator[str]:
    """Faults of one schema without its subschemas."""
    used = {key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")}
    alone = [key for key in _ALONE if key in used]
    if alone:
        yield from _alone_faults(schema, alone[0], used, root)
        return
    types = _types(schema)
    for keywords, of in _TYPES_OF:
        for key in sorted(used & keywords):
            # Objects are recognised by their keywords.
            if not set(types) & set(of) and not (keywords is _OBJECTS and not types):
                yield f"{key} holds beside type {' or '.join(of)} only"
    for key in sorted(used - _NUMBERS - _STRINGS - _ARRAYS - _OBJECTS - {"type"}):
        yield f"{key} is not held"
    for first, second in _APART:
        if first in used and second in used:
            yield f"{second} is not held beside {first}"
    if "multipleOf" in used and "number" in types:
        yield "multipleOf is held for type integer only"
    if "format" in used and schema["format"] not in _FORMATS:
        yield f"format {schema['format']!r} is not held (these are: {', '.join(sorted(_FORMATS))})"
    patterns = [schema["pattern"]] if "pattern" in used else []
    for pattern in [*patterns, *schema.get("patternProperties", {})]:
        for fault in json_pattern_faults(pattern):
            yield f"pattern {pattern!r}: {fault}"
    for name in schema.get("required", []):
        if name not in schema.get("properties", {}):
            yield f"required {name!r} is not held unless properties declares it"


def _alone_faults(schema: dict[str, Any], key: str, used: set[str], root: object) -> Iterator[str]:
    values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(key)
    beside = used - {key}
    if values is not None:
        types = _types(schema) or list(_IS_TYPE)
        if all(any(_IS_TYPE[each](value) for each in types) for value in values):
            beside -= {"type"}
    for other in sorted(beside):
        yield f"{other} is not held beside {key}"
    if key == "$ref" and _target(schema[key], root) is None:
        yield f"$ref {schema[key]!r} must be '#' or lead from '#/' to a schema"
    if key == "allOf" and len(schema[key]) != 1:
        yield "allOf of more than one schema is not held"
    if key == "oneOf" and not _is_exclusive(schema[key], root):
        yield "oneOf is held where the schemas differ in type or in a required constant; anyOf allows any"


def _types(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _is_exclusive(schemas: list[Any], root: object) -> bool:
    """Whether no value can be valid by two of `schemas`, as their types and required constants show."""
    kinds: list[set[str]] = []
    objects: list[dict[str, Any]] = []
    for schema in (_followed(each, root) for each in schemas):
        if not isinstance(schema, dict) or list(_form_faults(schema)) or not (types := _types(schema)):
            return False
        if types == ["object"]:
            objects.append(schema)
        else:
            kinds.append({"number" if each == "integer" else each for each in types})
    if objects:
        kinds.append({"object"})
    if sum(map(len, kinds)) != len(set().union(*kinds)):
        return False
    return len(objects) < 2 or any(_differ_in(name, objects, root) for name in objects[0].get("required", []))


def _differ_in(name: str, objects: list[dict[str, Any]], root: object) -> bool:
    """Whether all of `objects` require a property `name`, each with constants of its own."""
    seen: list[object] = []
    for schema in objects:
        constant = _followed(schema.get("properties", {}).get(name), root)
        if name not in schema.get("required", []) or not isinstance(constant, dict):
            return False
        values = [constant["const"]] if "const" in constant else constant.get("enum")
        if not isinstance(values, list) or any(value in seen for value in values):
            return False
        seen += values
    return True


def _followed(schema: object, root: object) -> object:
    """`schema`, or what its $ref leads to, one step far."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    return _target(ref, root) if isinstance(ref, str) else schema


def _target(ref: str, root: object) -> object:
    """What a local reference leads to, or None."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    target = root
    for part in ref[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target
