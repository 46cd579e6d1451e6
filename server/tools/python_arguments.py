"""The arguments of a Python call, rewritten as a JSON object while they come. Used by the `pythonic` parser.

Understood are keyword arguments whose values are strings, numbers, True, False, None, lists, tuples and dicts of these;
a bare word becomes a string. Spacing stays as it was. What JSON and Python write alike is passed over by one regular
expression.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 128
MAX_STEPS = 16384
"""Tokens and escapes of one answer that need rewriting. What has more is no call that anybody meant."""
_MAX_RUN = 1024
"""How many of them are rewritten at once."""
_MAX_WORD_CHARS = 256
_MAX_BRACKETS_CHARS = 4096

_WS = r"[ \t\r\n]*+"
_NUMBER = r"-?(?:0|[1-9]\d*+)(?:\.\d++)?+(?:[eE][+-]?\d++)?+"
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\[nrtbf"\\])*+"'


def _alike(levels: int) -> str:
    """A value that is the same in both languages, nested up to `levels` deep."""
    if not levels:
        return f"(?:{_STRING}|{_NUMBER})"
    inner = _alike(levels - 1)
    items = rf"(?:{inner}{_WS}(?:,{_WS}(?!\])|(?=\])))*+"
    pairs = rf"(?:{_STRING}{_WS}:{_WS}{inner}{_WS}(?:,{_WS}(?!\}})|(?=\}})))*+"
    return rf"(?:{_STRING}|{_NUMBER}|\[{_WS}{items}\]|\{{{_WS}{pairs}\}})"


_BEHIND = rf"(?={_WS}[,\]}})])"
_BRACKETS = re.compile(rf"(?=[\[{{]){_alike(3)}")
_ITEMS = re.compile(rf"(?:,{_WS}{_alike(3)}{_BEHIND}{_WS})++")
_PAIRS = re.compile(rf"(?:,{_WS}{_STRING}{_WS}:{_WS}{_alike(3)}{_BEHIND}{_WS})++")
_ARGUMENT = rf",({_WS})([A-Za-z_][A-Za-z_0-9]{{0,63}}+){_WS}=({_WS}{_alike(0)})"
_ARGUMENTS = re.compile(rf"(?:{_ARGUMENT}{_BEHIND}{_WS}){{1,{_MAX_RUN}}}+")
_ONE_ARGUMENT = re.compile(_ARGUMENT)
_SPACE = re.compile(r"[ \t\r\n]++")
_WORD = re.compile(r"[\w.+\-]++")
_IS_NUMBER = re.compile(_NUMBER)
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSER_OF = {"[": "]", "(": ")", "{": "}"}

_HEX = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"
_BODIES = {quote: re.compile(rf"(?:[^{quote}\\]++|\\[^xuU]|{_HEX}){{0,{_MAX_RUN}}}+", re.DOTALL) for quote in "'\""}
_HEX_SO_FAR = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_ESCAPE = re.compile(rf"{_HEX}|\\(.)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Only an escape can have made one; UTF-8 has none."""
_MEANINGS = {"\n": "", "'": "'", '"': '"', "\\": "\\", "a": "\a", "v": "\v", "n": "\n", "r": "\r", "t": "\t"} | {
    "b": "\b",
    "f": "\f",
}


class PythonArguments:
    """What stands between a call's parentheses, the closing one included."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.steps_left = steps
        self.ended = False
        self.broken = False
        """No Python that is understood here: what came out so far, and the rest, is no JSON."""
        self._out = ["{"]
        self._state = self._name
        self._num_arguments = 0
        self._closers: list[str] = []
        """Of the brackets that are open within a value."""
        self._comma = False
        """A comma within a value waits, for none is written before a closing bracket."""
        self._space: list[str] = []
        """What stands behind a comma that waits."""
        self._may_close = False
        """Within a value: an opening bracket or a comma was last."""
        self._quote = ""

    def scan(self, text: str, position: int) -> tuple[str, int]:
        """(a piece of JSON, how far it has come). Unless it has `ended` or `broken`, what is left of `text` are a few
        characters that make no sense without the next ones: they are to come again with these."""
        end = len(text)
        while position < end and not (self.ended or self.broken):
            self._charge(1)
            behind = self._state(text, position) if self.steps_left else self._break(position)
            if behind == position:
                break
            position = behind
        out, self._out = "".join(self._out), []
        return out, position

    # --- states: each returns the next position, or `position` itself to wait for more text -------------------------

    def _name(self, text: str, position: int) -> int:
        """An argument's name, or the closing parenthesis."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._space.append(space.group())
            return space.end()
        if text[position] == ")":
            return self._end(position)
        behind = self._word(text, position)
        word = text[position:behind]
        if behind > position:
            if not word.isidentifier():
                return self._break(position)
            self._write_space(comma=self._num_arguments > 0)
            self._num_arguments += 1
            self._out.append(f'"{word}"')
            self._state = self._equals
        return behind

    def _equals(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        if text[position] != "=":
            return self._break(position)
        self._out.append(":")
        self._state, self._may_close = self._value, False
        return position + 1

    def _value(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            (self._space if self._comma else self._out).append(space.group())
            return space.end()
        character = text[position]
        if character in "'\"":
            self._write_space(comma=self._comma)
            self._out.append('"')
            self._state, self._quote = self._string, character
            return position + 1
        if character in "[({":
            return self._open(text, position, character)
        if character in "])}" and self._may_close:
            return self._close(position, character)
        behind = self._word(text, position)
        if behind > position:
            self._write_space(comma=self._comma)
            self._out.append(_word_as_json(text[position:behind]))
            self._state = self._behind_value
        return behind

    def _open(self, text: str, position: int, character: str) -> int:
        self._write_space(comma=self._comma)
        # Not further: of one that is never closed, nothing but its first bracket would be used.
        whole = _BRACKETS.match(text, position, position + _MAX_BRACKETS_CHARS)
        if whole is not None:
            self._out.append(whole.group())
            self._state = self._behind_value
            return whole.end()
        if len(self._closers) == MAX_DEPTH:
            return self._break(position)
        self._out.append("{" if character == "{" else "[")
        self._closers.append(_CLOSER_OF[character])
        self._may_close = True
        return position + 1

    def _behind_value(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            self._out.append(space.group())
            return space.end()
        character = text[position]
        if character == ",":
            return self._at_comma(text, position)
        if character == ":" and self._closers and self._closers[-1] == "}":
            self._out.append(":")
            self._state, self._may_close = self._value, False
            return position + 1
        return self._close(position, character)

    def _at_comma(self, text: str, position: int) -> int:
        if not self._closers:
            several = _ARGUMENTS.match(text, position)
            if several is None:
                self._state = self._name
                return position + 1
            rewritten, count = _ONE_ARGUMENT.subn(r',\1"\2":\3', several.group())
            self._num_arguments += count
            self._charge(count)
            self._out.append(rewritten)
            return several.end()
        several = (_PAIRS if self._closers[-1] == "}" else _ITEMS).match(text, position)
        if several is None:
            self._comma = self._may_close = True
            self._state = self._value
            return position + 1
        self._out.append(several.group())
        return several.end()

    def _close(self, position: int, character: str) -> int:
        if not self._closers:
            return self._end(position) if character == ")" else self._break(position)
        if self._closers.pop() != character:
            return self._break(position)
        self._write_space(comma=False)
        self._comma = False
        self._out.append("}" if character == "}" else "]")
        self._state = self._behind_value
        return position + 1

    def _end(self, position: int) -> int:
        self._write_space(comma=False)
        self._out.append("}")
        self.ended = True
        return position + 1

    def _break(self, position: int) -> int:
        self._write_space(comma=self._comma or (self._state == self._name and self._num_arguments > 0))
        self.broken = True
        return position

    def _string(self, text: str, position: int) -> int:
        body = _BODIES[self._quote].match(text, position)
        if body is not None and body.end() > position:
            self._charge(body.group().count("\\"))
            self._out.append(_string_as_json(body.group()))
            return body.end()
        if text[position] == self._quote:
            self._out.append('"')
            self._state = self._behind_value
            return position + 1
        if _HEX_SO_FAR.match(text, position):
            return position
        self._out.append("\\\\")  # a backslash that escapes nothing
        return position + 1

    # --- helpers --------------------------------------------------------------------------------------------------

    def _word(self, text: str, position: int) -> int:
        """The end of the word at `position`; `position` if it may go on, or (then it is `broken`) if there is none."""
        word = _WORD.match(text, position, position + _MAX_WORD_CHARS)
        if word is None:
            return self._break(position)
        may_go_on = word.end() == len(text) and word.end() - position < _MAX_WORD_CHARS
        return position if may_go_on else word.end()

    def _charge(self, steps: int) -> None:
        self.steps_left = max(0, self.steps_left - steps)

    def _write_space(self, *, comma: bool) -> None:
        if comma:
            self._out.append(",")
        self._out += self._space
        self._space.clear()
        self._comma = False


def _word_as_json(word: str) -> str:
    """A word that is neither a number nor a constant is an enumeration's member, most likely."""
    if _IS_NUMBER.fullmatch(word):
        return word
    return _CONSTANTS.get(word) or json.dumps(word, ensure_ascii=False)


def _string_as_json(body: str) -> str:
    """The inside of a Python string literal as that of a JSON string."""
    if "\\" in body:
        body = _ESCAPE.sub(_meaning, body)
    return _SURROGATE.sub(lambda each: f"\\u{ord(each[0]):04x}", json.dumps(body, ensure_ascii=False)[1:-1])


def _meaning(escape: re.Match[str]) -> str:
    letter = escape[1]
    if letter is not None:
        return _MEANINGS.get(letter, escape[0])
    try:
        return chr(int(escape[0][2:], 16))
    except (ValueError, OverflowError):
        return escape[0]
