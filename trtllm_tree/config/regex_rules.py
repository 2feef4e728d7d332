"""Which regular expressions constrain an output exactly: xgrammar drops misplaced anchors and escapes it does not know.

It refuses the rest that it cannot say (lookaround, references, word borders) itself. The whole text is always matched,
and `.` is any character, line breaks included. A `pattern` in a JSON schema is read by another, more exact part of it.
Found by trying on xgrammar 0.2.9. Must not know xgrammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Classes, control characters and codes; of the others xgrammar refuses b, B, k, p and P itself.
_ESCAPES = frozenset("adDwWsSnrtfvexucbBkpP0")

# In a pattern of a JSON string: quotes, backslashes and control characters, and codes, which may stand for them.
_ESCAPED = frozenset('\\"nrtfvae0cxu')


# A class that an escaped caret begins; the caret may be written as a code.
_CARET_FIRST = re.compile(r"\[\\(\^|x5e|u005e|u\{0*5e\})", re.IGNORECASE)
_TWO_HEX = re.compile(r"\\x[0-9a-fA-F]{2}(?![0-9a-fA-F])")


def regex_faults(regex: str) -> list[str]:
    """What of `regex` would be dropped or read otherwise."""
    return [*_faults(regex), *_misread(regex)]


def json_pattern_faults(regex: str) -> list[str]:
    """What of a `pattern` would be dropped or read otherwise, or could break the JSON string that it describes.

    A character that JSON escapes is written unescaped where the pattern names it; classes do not hold it.
    """
    return [*_faults(regex), *_unescaped(regex)]


def _tokens(regex: str) -> Iterator[tuple[int, str, bool]]:
    """Characters, and backslashes with what they escape: where each begins, and whether that is in a class."""
    in_class, index = False, 0
    while index < len(regex):
        token = regex[index : index + 2] if regex[index] == "\\" else regex[index]
        yield index, token, in_class
        in_class = token != "]" if in_class else token == "["
        index += len(token)


def _unescaped(regex: str) -> Iterator[str]:
    for index, token, in_class in _tokens(regex):
        named = f"at position {index + 1} names what a JSON string has to escape"
        if in_class:
            continue
        if token[0] == "\\":
            if token[1:] in _ESCAPED:
                yield f"{token} {named}, or may do so"
        elif token == '"' or token < " ":
            yield f"{token!r} {named}"
        elif token == "]":
            yield f"] at position {index + 1} closes nothing; write it as \\]"


def _faults(regex: str) -> Iterator[str]:
    depth = 0
    for index, token, in_class in _tokens(regex):
        place = f"at position {index + 1}"
        if token[0] == "\\":
            if token.isascii() and token[1:].isalnum() and token[1] not in _ESCAPES:
                yield f"the escape {token} {place} is not known"
        elif in_class:
            continue
        elif token in "()":
            depth += 1 if token == "(" else -1
        elif token == "^" and (depth or (index and regex[index - 1] != "|")):
            yield f"^ {place} holds at the start of the whole expression or of its alternatives only"
        elif token == "$" and (depth or regex[index + 1 : index + 2] not in ("", "|")):
            yield f"$ {place} holds at the end of the whole expression or of its alternatives only"


def _misread(regex: str) -> Iterator[str]:
    for index, token, in_class in _tokens(regex):
        place = f"at position {index + 1}"
        if token == "\\x" and not _TWO_HEX.match(regex, index):
            yield f"\\x {place} needs two hex digits and no further one behind them; write \\u with four"
        elif token == "\\0" and regex[index + 2 : index + 3].isdigit():
            yield f"\\0 {place} is followed by a digit; write \\u0000"
        elif token == "[" and not in_class and _CARET_FIRST.match(regex, index):
            yield f"the class {place} begins with an escaped ^, which would negate it; write the ^ last in it"
        elif token == "[" and not in_class and regex.startswith("[^]", index):
            yield f"the class {place} begins with ], which would end it; write \\]"
