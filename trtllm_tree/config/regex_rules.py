"""Which regular expressions constrain an output exactly: xgrammar drops misplaced anchors and escapes it does not know.

It refuses the rest that it cannot say (lookaround, references, word borders) itself. The whole text is always matched,
and `.` is any character, line breaks included. Found by trying on xgrammar 0.2.9. Must not know xgrammar.
"""

from __future__ import annotations

from collections.abc import Iterator

# Classes, control characters and codes; of the others xgrammar refuses b, B, k, p and P itself.
_ESCAPES = frozenset("adDwWsSnrtfvexucbBkpP0")

# In a pattern of a JSON string: quotes, backslashes and control characters, and codes, which may stand for them.
_ESCAPED = frozenset('\\"nrtfvae0cxu')


def regex_faults(regex: str) -> list[str]:
    """What of `regex` would be dropped or read otherwise."""
    return list(_faults(regex))


def json_pattern_faults(regex: str) -> list[str]:
    """What of a `pattern` would be dropped or read otherwise, or could break the JSON string that it describes.

    A character that JSON escapes is written unescaped where the pattern names it; classes do not hold it.
    """
    return [*_faults(regex), *_unescaped(regex)]


def _unescaped(regex: str) -> Iterator[str]:
    in_class, index = False, 0
    while index < len(regex):
        char, named = regex[index], f"at position {index + 1} names what a JSON string has to escape"
        if char == "\\":
            index += 1
            if not in_class and regex[index : index + 1] in _ESCAPED:
                yield f"\\{regex[index]} {named}, or may do so"
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == '"' or char < " ":
            yield f"{char!r} {named}"
        elif char == "]":
            yield f"] at position {index + 1} closes nothing; write it as \\]"
        index += 1


def _faults(regex: str) -> Iterator[str]:
    depth, in_class, index = 0, False, 0
    while index < len(regex):
        char, place = regex[index], f"at position {index + 1}"
        if char == "\\":
            index += 1
            escaped = regex[index : index + 1]
            if escaped.isascii() and escaped.isalnum() and escaped not in _ESCAPES:
                yield f"the escape \\{escaped} {place} is not known"
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "^" and (depth or (index and regex[index - 1] != "|")):
            yield f"^ {place} holds at the start of the whole expression or of its alternatives only"
        elif char == "$" and (depth or regex[index + 1 : index + 2] not in ("", "|")):
            yield f"$ {place} holds at the end of the whole expression or of its alternatives only"
        index += 1
