"""What `--data` names: one source or several, each with a split, a slice and a weight.

    rows.jsonl                                      a file
    chats/:test                                     a split of a folder
    owner/name:train[:1000]                         a slice of a split of a hub data set
    owner/name:config:train                         of one of its configurations
    a.jsonl*2,b.jsonl[-10%:]*0.5                    several; an epoch has a's rows twice, half of b's last tenth once

A name that exists as it is written is taken so, whatever characters it has.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastjax.errors import UserError

T = TypeVar("T")

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")

_SPEC = re.compile(
    r"(?P<name>.+?)(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.-]+))?(?:\[(?P<slice>[^\[\]]*)\])?(?:\*(?P<weight>[^*]*))?"
)
_BOUND = re.compile(r"\s*(-?\d+)(%?)\s*")


@dataclass(frozen=True)
class Slice:
    """Rows [start, stop) of a split, as Python counts; with `percent` set, of a hundred."""

    start: tuple[int, bool] | None = None
    stop: tuple[int, bool] | None = None

    @property
    def needs_total(self) -> bool:
        """Whether the rows have to be counted before the slice is known."""
        return any(bound is not None and (bound[1] or bound[0] < 0) for bound in (self.start, self.stop))

    def range(self, total: int | None) -> tuple[int, int | None]:
        """The first row and the one after the last; None goes to the end."""
        bounds = [None if bound is None else _row(bound, total) for bound in (self.start, self.stop)]
        return bounds[0] or 0, bounds[1]

    def of(self, rows: Iterable[T], count: int | None) -> Iterator[T]:
        """The slice of the rows; `count` is their number where `needs_total`."""
        start, stop = self.range(count)
        for number, row in enumerate(rows):
            if stop is not None and number >= stop:
                return
            if number >= start:
                yield row


@dataclass(frozen=True)
class Source:
    """One source of rows.

    Attributes:
      name: a file, a folder, or a hub id.
      split: of a folder or data set; None is train.
      config: of a hub data set; None is its only one.
      rows: the part of the split.
      weight: how often an epoch sees each row; the fraction takes a part of the rows.
    """

    name: str
    split: str | None = None
    config: str | None = None
    rows: Slice = Slice()
    weight: float = 1.0
    text: str = ""

    def __str__(self) -> str:
        return self.text or self.name


def parse_sources(text: str) -> list[Source]:
    """The sources that a text names, at least one.

    Raises: UserError for a slice or weight that is none, or an empty name.
    """
    if _exists(text):
        return [Source(text, text=text)]
    return [_parse(part.strip(), text) for part in _split(text)]


def _split(text: str) -> list[str]:
    """Parts at commas; a name with commas that exists stays whole."""
    parts = text.split(",")
    found: list[str] = []
    while parts:
        for count in range(len(parts), 0, -1):
            joined = ",".join(parts[:count])
            if count == 1 or _exists(joined.strip()):
                found.append(joined)
                parts = parts[count:]
                break
    return found


def _parse(part: str, whole: str) -> Source:
    if not part:
        raise UserError(f"data={whole!r} has an empty name between its commas; name a file, a folder or a hub id")
    if _exists(part):
        return Source(part, text=part)
    found = _SPEC.fullmatch(part)
    if found is None:
        raise UserError(f"data={whole!r} is not understood at {part!r}; write NAME:SPLIT[START:STOP]*WEIGHT")
    name, first, second = found["name"], found["first"], found["second"]
    if not _exists(name) and _exists(part.split("*")[0].split("[")[0]):
        name, first, second = part.split("*")[0].split("[")[0], None, None
    config, split = (first, second) if second else (None, first)
    if config is not None and _exists(name):
        raise UserError(
            f"data={part!r}: {name} is on this disk and has splits, but no configurations; write NAME:SPLIT"
        )
    return Source(name, split, config, _slice(found["slice"], part), _weight(found["weight"], part), part)


def _slice(text: str | None, part: str) -> Slice:
    if text is None:
        return Slice()
    bounds = text.split(":")
    if len(bounds) == 2 and all(not bound.strip() or _BOUND.fullmatch(bound) for bound in bounds):
        start, stop = (_bound(bound) for bound in bounds)
        return Slice(start, stop)
    raise UserError(f"data={part!r}: [{text}] is not a slice; write [START:STOP], such as [:1000], [-100:] or [90%:]")


def _bound(text: str) -> tuple[int, bool] | None:
    found = _BOUND.fullmatch(text)
    return None if found is None else (int(found[1]), bool(found[2]))


def _row(bound: tuple[int, bool], total: int | None) -> int:
    value, percent = bound
    if percent or value < 0:
        assert total is not None, "a slice counted from the end needs the number of rows"
        if percent:
            value = round(total * value / 100)
        if value < 0:
            value = max(0, total + value)
    return value


def _weight(text: str | None, part: str) -> float:
    if text is None:
        return 1.0
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= 1000:
        raise UserError(
            f"data={part!r}: *{text} is not a weight; it is a number above 0 and at most 1000, how often an epoch sees "
            "each row"
        )
    return weight


def _exists(name: str) -> bool:
    try:
        return bool(name) and os.path.exists(Path(name))
    except (OSError, ValueError):
        return False
