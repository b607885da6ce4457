"""JSON data files read piece by piece: a list of objects, or objects one after another."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from fastjax.errors import UserError

_PIECE = 1 << 20  # characters read at once
_SPACE = re.compile(r"[ \t\r\n]*")
# A value that the end of the piece cuts is found wrong at most this far before it; a string, anywhere.
_NEAR_END = 16
_DECODER = json.JSONDecoder()


def read_json(path: Path, file: TextIO) -> Iterator[tuple[Any, str]]:
    """Pairs (row, place) of a JSON file; at most some rows and a piece of the file are in memory.

    Raises: UserError for broken syntax, naming the line.
    """
    text = _Pieces(path, file)
    first = text.peek()
    if not first:
        return
    if first == "[":
        yield from _read_array(text)
    elif first == "{":
        # Many .json files are JSON lines; a single object is the shortest of them, also when it spans lines.
        while text.peek():
            place = text.place()
            yield text.value(), place
    else:
        raise UserError(f"{path}:1: starts with {first!r}; a JSON data file is a list of objects, or one a line")


def _read_array(text: "_Pieces") -> Iterator[tuple[Any, str]]:
    text.skip()
    number = 0
    if text.peek() == "]":
        return
    while True:
        number += 1
        text.peek()
        place = f"{text.place()} (item {number})"
        yield text.value(), place
        mark = text.peek()
        if mark == "]":
            return
        if mark != ",":
            found = repr(mark) if mark else "the end of the file"
            raise UserError(f"{text.place()}: broken JSON (found {found} where ',' or ']' belongs)")
        text.skip()


class _Pieces:
    """The part of the file that is being looked at, and its line number."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._position, self._line = "", 0, 1

    def peek(self) -> str:
        """The next character that is no white space; '' at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._position)
            assert found is not None
            self._advance(found.end())
            if self._position < len(self._text) or not self._more(_PIECE):
                return self._text[self._position : self._position + 1]

    def skip(self) -> None:
        self._advance(self._position + 1)

    def place(self) -> str:
        return f"{self._path}:{self._line}"

    def value(self) -> Any:
        """The JSON value that starts here."""
        size = _PIECE
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
                if end < len(self._text) or not self._more(size):
                    self._advance(end)
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_END
                if not (cut and self._more(size)):
                    line = self._line + self._text.count("\n", self._position, error.pos)
                    raise UserError(f"{self._path}:{line}: broken JSON ({error.msg}, column {error.colno})") from None
            except RecursionError:
                raise UserError(f"{self.place()}: broken JSON (nested too deeply)") from None
            except ValueError as error:  # Python reads no whole number of thousands of digits
                raise UserError(f"{self.place()}: unreadable JSON ({error})") from None
            size *= 2  # a value of many pieces is looked at a few times only

    def _more(self, size: int) -> bool:
        """Read on, and let go of what is behind; False at the end of the file."""
        piece = self._file.read(size)
        self._text = self._text[self._position :] + piece
        self._position = 0
        return bool(piece)

    def _advance(self, position: int) -> None:
        self._line += self._text.count("\n", self._position, position)
        self._position = position
