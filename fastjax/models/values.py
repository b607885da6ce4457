"""Values out of JSON files, read by type and range: whatever a file holds becomes a sound value or a UserError.

`name` is what a message calls the value, file and key: `config.json: hidden_size`.
"""

from typing import Any

from fastjax.errors import UserError

INT32_MAX = 2**31 - 1


def whole(value: Any, name: str, least: int = 1, most: int = INT32_MAX) -> int:
    """The value as a whole number in [least, most]. Raises: UserError if it is anything else; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        top = "" if most == INT32_MAX and isinstance(value, int) and value < least else f" and at most {most}"
        raise UserError(f"{name}={shown(value)} must be a whole number of at least {least}{top}")
    return value


def number(value: Any, name: str, least: float, most: float, *, above: bool = False) -> float:
    """The value as a finite number in [least, most], or in (least, most] if `above`. Raises: UserError otherwise."""
    sound = not isinstance(value, bool) and isinstance(value, int | float) and least <= value <= most
    if not sound or (above and value == least):
        raise UserError(
            f"{name}={shown(value)} must be a finite number {'above' if above else 'of at least'} {least} and at most "
            f"{most}"
        )
    return float(value)


def flag(value: Any, name: str) -> bool:
    """The value, true or false. Raises: UserError if it is anything else."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={shown(value)} must be true or false")
    return value


def token_id(value: Any, name: str, vocab_size: int) -> int:
    """The value as an id of the vocabulary. Raises: UserError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise UserError(f"{name}={shown(value)} must be a token id, a whole number from 0 to {vocab_size - 1}")
    return value


def token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of one id, a list of ids, or null. Raises: UserError if it is none of them."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(token_id(item, f"{name}[{index}]", vocab_size) for index, item in enumerate(value))
    return (token_id(value, name, vocab_size),)


def same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1 and false is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def shown(value: Any, width: int = 100) -> str:
    """The value for a message, cut to `width` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print whole numbers of thousands of digits
        text = f"({type(value).__name__})"
    return text if len(text) <= width else f"{text[:width]}..."
