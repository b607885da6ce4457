"""Settings as dataclass fields: their help, their rule, and the one conversion that flags, YAML and Python share.

This module is a leaf beside fastjax.errors: it imports the standard library only, so that a command can complain
about a flag before jax is loaded.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from fastjax.errors import UserError

T = TypeVar("T")

MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy: numeric bounds, and names that a later release will know."""

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    later: Mapping[str, str] = dataclasses.field(default_factory=dict)


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    later: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field with its help text and its rule.

    Args:
      default: the value when nothing is said; dicts are copied.
      minimum, above, below: value >= minimum, value > above, value < below.
      later: {value: way out} for values that the design knows and this release does not have.
    """
    metadata = {"help": help, "rule": Rule(minimum, above, below, later or {})}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_types(settings: type) -> dict[str, Any]:
    """{setting's name: its type}, in the order of the class."""
    hints = typing.get_type_hints(settings)
    return {f.name: hints[f.name] for f in dataclasses.fields(settings) if f.init}


def is_switch(hint: Any) -> bool:
    """Whether a setting is given by its bare flag, or by that with no_ before it."""
    return hint in (bool, bool | None)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """'; did you mean X?' for the known name nearest to `name`, or '' if none is near."""
    lowered = {word.lower(): word for word in known}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.55)
    return f"; did you mean {prefix}{lowered[found[0]]}?" if found else ""


def from_text(name: str, hint: Any, text: str) -> Any:
    """Read the text of a flag as the setting's type; the result still has to pass `check`.

    Lists are comma-separated, dicts are JSON, `none` or `null` is None where None is allowed.
    Raises: UserError naming the setting.
    """
    kinds = _kinds(hint)
    if is_none(hint, text):
        return None
    try:
        if dict in kinds:
            return json.loads(text)
        if tuple in kinds:
            return _list_from_text(kinds, text)
        if int in kinds:
            return int(text)
        if float in kinds:
            return float(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is not {describe(hint)}") from None
    return text


def is_none(hint: Any, text: str) -> bool:
    """Whether the text stands for None, in a setting that may be None."""
    return type(None) in _kinds(hint) and text.lower() in ("none", "null")


def check(name: str, hint: Any, value: Any, rule: Rule | None = None) -> Any:
    """Return `value` in the setting's type, if it has that type and keeps the rule.

    A whole number is a float too, a list becomes a tuple, and YAML's habit of reading 2e-4 as text is forgiven.
    Raises: UserError naming the setting, the value and the rule.
    """
    kinds, rule = _kinds(hint), rule or Rule()
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, str) and value in rule.later:
        raise UserError(f"{name}={value!r} is not in this release; {rule.later[value]}")
    choices = _choices(hint)
    if choices and value not in choices:
        guess = nearest(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{name}={value!r} is not one of {', '.join(choices)}{guess}")
    value = _as_kind(kinds, value)
    if not _is_kind(hint, value):
        raise UserError(f"{name}={value!r} is not {describe(hint)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value} is not a finite number")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_bounds(name, value, rule)
    return value


def build(settings: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the settings dataclass from checked values.

    Raises: UserError for an unknown name (with the nearest one) and for a value of the wrong type or range.
    """
    hints = field_types(settings)
    for name in values:
        if name not in hints:
            raise UserError(f"unknown setting {name!r}{nearest(name, hints)}")
    checked = {name: check(name, hints[name], value, rule_of(settings, name)) for name, value in values.items()}
    return settings(**checked)


def check_all(instance: Any) -> None:
    """Put every field of the instance through `check`, in place. Raises: UserError for the first that fails."""
    for name, hint in field_types(type(instance)).items():
        setattr(instance, name, check(name, hint, getattr(instance, name), rule_of(type(instance), name)))


def rule_of(settings: type, name: str) -> Rule:
    """The rule that a field was declared with."""
    return settings.__dataclass_fields__[name].metadata.get("rule", Rule())  # type: ignore[attr-defined]


def describe(hint: Any) -> str:
    """A type in the words of a message: 'a whole number', 'one of lora, full'."""
    return _words(hint)[0]


def metavar(hint: Any) -> str:
    """A type in the short form of a help text: N, lora|full, NAME,NAME."""
    return _words(hint)[1]


def _words(hint: Any) -> tuple[str, str]:
    kinds, choices = _kinds(hint), _choices(hint)
    if choices:
        return f"one of {', '.join(choices)}", "|".join(choices)
    if tuple in kinds:
        whole = _item_type(hint) is int
        return ("a list of whole numbers", "N,N") if whole else ("a name or a list of names", "NAME,NAME")
    for kind, words, short in (
        (dict, 'a mapping of names to numbers (JSON on the command line, such as {"q_proj": 8})', "JSON"),
        (bool, "true or false", ""),
        (int, "a whole number", "N"),
        (float, "a number", "X"),
    ):
        if kind in kinds:
            return words, short
    return "a text", "TEXT"


def _kinds(hint: Any) -> set[type]:
    """The plain types that a hint is made of: `tuple[str, ...] | None` gives {tuple, NoneType}."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*(_kinds(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return {str}
    return {typing.get_origin(hint) or hint}


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return ()


def _item_type(hint: Any) -> type:
    """What a tuple hint holds: int for `tuple[int, ...] | None`."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is tuple:
            return typing.get_args(part)[0]
    return str


def _list_from_text(kinds: set[type], text: str) -> Any:
    """'q_proj,v_proj' is a list of names; with str allowed too, anything but plain names stays one string (a regex)."""
    parts = [part.strip() for part in text.split(",")]
    if str in kinds:
        return tuple(parts) if all(MODULE_NAME.fullmatch(part) for part in parts) else text
    if all(re.fullmatch(r"-?\d+", part) for part in parts):
        return tuple(int(part) for part in parts)
    if all(MODULE_NAME.fullmatch(part) for part in parts):
        return tuple(parts)
    raise ValueError(text)


def _as_kind(kinds: set[type], value: Any) -> Any:
    if isinstance(value, list) and tuple in kinds:
        return tuple(value)
    if float in kinds and int not in kinds and not isinstance(value, bool):
        if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
            return float(value)
        if isinstance(value, int):
            return float(value)
    return value


def _is_kind(hint: Any, value: Any) -> bool:
    kinds = _kinds(hint)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, tuple) and tuple in kinds:
        item = _item_type(hint)
        return len(value) > 0 and all(isinstance(v, item) and not isinstance(v, bool) for v in value)
    if isinstance(value, dict) and dict in kinds:
        return all(
            isinstance(k, str) and isinstance(v, int | float) and not isinstance(v, bool) for k, v in value.items()
        )
    return isinstance(value, tuple(kinds - {tuple, dict}))


def _check_bounds(name: str, value: float, rule: Rule) -> None:
    if rule.minimum is not None and value < rule.minimum:
        raise UserError(f"{name}={value} is too small; it must be {rule.minimum} or more")
    if rule.above is not None and value <= rule.above:
        raise UserError(f"{name}={value} is too small; it must be more than {rule.above}")
    if rule.below is not None and value >= rule.below:
        raise UserError(f"{name}={value} is too large; it must be less than {rule.below}")
