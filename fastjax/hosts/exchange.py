"""Words between the processes of a run, through the key-value store of jax's coordination service.

No device takes part, so nothing here waits for a step, and any thread may call it. In a run of one process every
function answers at once.
"""

import itertools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastjax.errors import UserError

T = TypeVar("T")

_PREFIX = "fastjax"
# Others may still be tokenising, or writing a large model. If one fails or is lost meanwhile, `watch` ends the wait.
_FOR_EVER_MS = 7 * 24 * 3600 * 1000
_calls = itertools.count()


def client() -> Any:
    """jax's client of the coordination service; None in a run of one process."""
    from jax._src import distributed  # the public jax.distributed has no way to it

    return distributed.global_state.client if distributed.global_state.num_processes > 1 else None


def num_processes() -> int:
    """How many processes take part in this run."""
    from jax._src import distributed

    return distributed.global_state.num_processes if client() is not None else 1


def process_id() -> int:
    """This process's number, from 0."""
    from jax._src import distributed

    return distributed.global_state.process_id if client() is not None else 0


def is_first() -> bool:
    """Whether this is the process that writes files and talks to the person."""
    return process_id() == 0


def this_process() -> str:
    """This process in words."""
    return f"process {process_id()} of {num_processes()} on {socket.gethostname()}"


def put(key: str, value: Any) -> bool:
    """Makes a value known under a key, unless another process has been first; JSON. Returns: whether it was."""
    try:
        client().key_value_set(f"{_PREFIX}/{key}", json.dumps(value))
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def get(key: str, timeout_s: float | None = None) -> Any:
    """The value under a key, which is waited for. Raises: TimeoutError."""
    try:
        text = client().blocking_key_value_get(
            f"{_PREFIX}/{key}", _FOR_EVER_MS if timeout_s is None else int(timeout_s * 1000)
        )
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"nobody said {key}") from error
    return json.loads(text)


def below(key: str) -> dict[str, Any]:
    """{rest of the key: value} of all that is known below a key; does not wait."""
    found = client().key_value_dir_get(f"{_PREFIX}/{key}/")
    return {name.removeprefix(f"{_PREFIX}/{key}/"): json.loads(text) for name, text in found}


def unique(what: str) -> str:
    """A key that is new, and the same in all processes: they all have to ask in the same order."""
    return f"{what}/{next(_calls)}"


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives in the first process, in all of them; a UserError that it raises is raised in all.

    All processes have to call this, in the same order. The result must be one that JSON takes.
    """
    if num_processes() == 1:
        return make()
    key = unique("from_first")
    if is_first():
        try:
            value = make()
        except UserError as error:
            put(key, {"error": str(error)})
            raise
        put(key, {"value": value})
        return value
    answer = get(key)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def check_same(what: str, values: Mapping[str, Any]) -> None:
    """Whether all processes have the same values. Raises: UserError naming those that differ, where they do."""
    ours = json.loads(json.dumps(values))
    theirs = from_first(lambda: ours)
    differing = [
        f"{name} is {ours.get(name)!r} here and {theirs.get(name)!r} in process 0"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise UserError(f"{what} must be the same in all processes: {'; '.join(differing)}")


def smallest(value: int | None) -> int | None:
    """The smallest of all processes' values, where all have one, and None where not; in the same order in all."""
    if num_processes() == 1:
        return value
    key = unique("smallest")
    put(f"{key}/{process_id()}", value)
    values = [get(f"{key}/{process}") for process in range(num_processes())]
    return None if None in values else min(values)


def barrier(name: str | None = None) -> None:
    """Returns once all processes have come here. Args: name: None where all call this in the same order."""
    if num_processes() > 1:
        client().wait_at_barrier(f"{_PREFIX}/{name or unique('barrier')}", _FOR_EVER_MS)
