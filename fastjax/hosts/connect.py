"""From settings to connected processes, and from their last step to their end."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastjax.errors import UserError
from fastjax.hosts import exchange
from fastjax.hosts.watch import Watch
from fastjax.hosts.witness import Witness

# jax's coordination service notices a silent process some 9 to 13 s after its last heartbeat with this.
_HEARTBEAT_S = 15
# Some minutes, since a cluster may start its processes one after the other.
_TO_CONNECT_S = 300
_TO_TELL_S = 60


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of a run; None is found by jax in the environment of a job manager."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


_watch: Watch | None = None
_tried = False


def place_of(
    distributed: str, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Place | None:
    """The place that settings of these names give; None for a run of one process.

    Raises: UserError for settings that contradict each other.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if distributed == "auto":
        if len(missing) < len(given):
            name = next(name for name in given if name not in missing)
            raise UserError(
                f"distributed=auto finds the processes itself, and {name}={given[name]!r} is given; leave one of the "
                "two out"
            )
        return Place()
    if len(missing) == len(given):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        name = next(name for name in given if name not in missing)
        raise UserError(
            f"{name}={given[name]!r} without {' and '.join(missing)}; several processes are told coordinator, "
            "num_processes and process_id, or distributed=auto where a job manager starts them"
        )
    if process_id >= num_processes:
        raise UserError(
            f"process_id={process_id} with num_processes={num_processes}; processes count from 0 to {num_processes - 1}"
        )
    found = re.fullmatch(r"(.+):(\d+)", coordinator)
    if not found or not 0 < int(found[2]) < 65536:
        raise UserError(
            f"coordinator={coordinator!r} is not host:port; give the host of process 0 and a free port of it, such as "
            "node1:12345"
        )
    return Place(coordinator, num_processes, process_id)


@contextlib.contextmanager
def session(place: Place | None, explain: Callable[[BaseException], tuple[int, str]]) -> Iterator[None]:
    """The block runs in all processes, or comes to an end in all of them; only the first one's prints are seen.

    Args:
      explain: the exit code and the message of an error.
    Raises: UserError if the processes do not find each other.
    """
    if place is None:
        yield
        return
    watch = _connect(place, _TO_CONNECT_S)
    if watch is None:
        yield
        return
    try:
        with contextlib.ExitStack() as stack:
            if not exchange.is_first():
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield
    except BaseException as error:
        watch.fail(*explain(error))
        raise
    _leave(watch)


def finish(exit_code: int, argv: Sequence[str]) -> int:
    """The last act of a command: a process that failed ends, and so do those that wait for it.

    Args:
      argv: the command's flags: where they could not be read, the others are told through what of them is plain.
    Returns: exit_code, if there is nothing to do.
    """
    if exit_code == 0:
        return 0
    watch: Watch | None = None
    if _watch is None and not _tried and (place := _place_in(argv)) is not None:
        with contextlib.suppress(UserError):
            watch = _connect(place, _TO_TELL_S)
        if watch is not None:
            watch.fail(exit_code, f"exit code {exit_code}, before it had begun; its own message says why")
    if _watch is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        _watch.end(exit_code)
    return exit_code


def _connect(place: Place, timeout_s: int) -> Watch | None:
    """The watch over the other processes; None where there turn out to be none."""
    global _watch, _tried
    import jax

    _tried = True
    _check_port(place)
    who = "this process" if place.process_id is None else f"process {place.process_id} of {place.num_processes}"
    # jax ends a process from C++ where the others do not come.
    witness = Witness(
        f"error: {who} on {socket.gethostname()} found no connection to all others within {timeout_s} s; start "
        "all processes with the same coordinator and num_processes, the coordinator being a host that all reach by its "
        "name"
    )
    # Its own handler of SIGTERM would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            initialization_timeout=timeout_s,
            # One that is told its place may have all GPUs of a host; by Slurm's number jax would give it one.
            cluster_detection_method=None if place.coordinator is None else "deactivate",
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except (ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        if place.coordinator is None:
            raise UserError(
                f"distributed=auto: no job manager that jax knows (Slurm, Open MPI, Kubernetes) started this process "
                f"({reason}); give --coordinator host:port --num_processes N --process_id I"
            ) from error
        raise UserError(
            f"coordinator={place.coordinator!r}: process {place.process_id} of {place.num_processes} could not connect "
            f"({reason}); start all processes with the same coordinator, a free port of process 0's host"
        ) from error
    finally:
        witness.dismiss()
    _watch = Watch() if exchange.num_processes() > 1 else None
    return _watch


def _check_port(place: Place) -> None:
    """Raises: UserError if another program has the port on which process 0 waits for the others."""
    if place.coordinator is None or place.process_id != 0:
        return
    port = int(place.coordinator.rpartition(":")[2])
    with socket.socket() as probe:
        # As jax's own: a port that a run before has just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"coordinator={place.coordinator!r}: port {port} of this host cannot be had ({error.strerror}); give "
                "all processes another one"
            ) from None


def _leave(watch: Watch) -> None:
    global _watch
    import jax

    watch.leave()
    _watch = None
    jax.distributed.shutdown()


def _place_in(argv: Sequence[str]) -> Place | None:
    """What the flags say of the processes, whatever else is wrong with them."""
    flags = dict(re.findall(r"--([a-z_-]+)[ =](\S+)", " ".join(argv)))
    found = {name.replace("-", "_"): value for name, value in flags.items()}
    try:
        return place_of(
            found.get("distributed", "none"),
            found.get("coordinator"),
            *(int(found[name]) if name in found else None for name in ("num_processes", "process_id")),
        )
    except (UserError, ValueError):
        return None
