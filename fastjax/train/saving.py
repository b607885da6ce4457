"""One checkpoint on its way to the disk, in a thread of its own while the next steps run."""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from fastjax.hosts import exchange
from fastjax.models.checkpoint.files import replace_folder
from fastjax.train import files
from fastjax.train.manifest import MANIFEST, write_manifest

ARRAYS = "arrays"
# Orbax gives up after ten minutes of the wall clock, which may jump, and a slow disk may need longer.
_NEVER_S = 10**9


class Abandoned(Exception):
    """Nobody waits for this save any more: it leaves nothing behind."""


class Saving:
    """Writes `final`/arrays through Orbax's AsyncCheckpointer, then its manifest, and gives the folder its name.

    When the constructor returns, the arrays are copied: the next step may be given their buffers.

    Raises: OSError, from the constructor or later from `check` and `wait`; then nothing of the folder is left.
    """

    def __init__(
        self,
        final: Path,
        arrays: Mapping[str, jax.Array],
        contents: Mapping[str, Any],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: contents: of the manifest. then: called in the thread once the folder has its name."""
        self.final, self._arrays, self._contents, self._then = final, _detached(arrays), contents, then
        self._key = exchange.unique("save")
        self._copied, self._abandoned = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        # A daemon: a process that is told to end at once does not wait for the rest of a checkpoint.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()
        self._copied.wait()
        if self._failure is not None:
            self.wait()

    def check(self) -> bool:
        """Whether the save has ended. Raises: OSError if it failed; once."""
        if self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Returns when the folder has its name. Raises: OSError if the save failed; once."""
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Lets the save come to nothing, unless it is done; does not wait."""
        self._abandoned.set()

    def _run(self) -> None:
        try:
            if exchange.num_processes() > 1:
                self._write_together()
                return
            try:
                self._write()
            except TimeoutError:
                # Orbax counts its time by the wall clock: it has jumped, and does not jump at every try.
                self._write()
            self._then()
        except Abandoned:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._arrays = {}
            self._copied.set()

    def _write(self) -> None:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        files.check_room(self.final.parent, sum(array.nbytes for array in self._arrays.values()))
        with replace_folder(self.final, overwrite=True, ours=(ARRAYS, MANIFEST)) as temporary:
            if exchange.num_processes() > 1:
                exchange.put(f"{self._key}/folder", str(temporary.absolute()))
            self._write_arrays(temporary)
            write_manifest(temporary, self._contents)
            files.flush(temporary)
            if self._abandoned.is_set():
                raise Abandoned

    def _write_together(self) -> None:
        """The first process makes the folder and gives it its name; each writes the arrays that it has."""
        if exchange.is_first():
            self._write()
            self._then()
            exchange.put(f"{self._key}/done", True)
        else:
            self._write_arrays(Path(exchange.get(f"{self._key}/folder")))
            exchange.get(f"{self._key}/done")

    def _write_arrays(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        options: dict[str, Any] = {}
        if exchange.num_processes() > 1:
            # Named processes meet through jax's coordination service; otherwise on their devices, which the main thread
            # is giving the next step to.
            together = ocp.options.MultiprocessingOptions(
                active_processes=set(range(exchange.num_processes())),
                barrier_sync_key_prefix=self._key.replace("/", "_"),
            )
            options = {"multiprocessing_options": together}
        with (
            _disk_errors(self.final),
            ocp.AsyncCheckpointer(
                ocp.StandardCheckpointHandler(**options),
                async_options=ocp.AsyncOptions(timeout_secs=_NEVER_S),
                **options,
            ) as checkpointer,
        ):
            checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.StandardSave(dict(self._arrays)))
            self._copied.set()
            checkpointer.wait_until_finished()


def _detached(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays, so that donating the originals does not touch them.

    Orbax copies an accelerator's arrays to the host before `save` returns. On a CPU its copy is a view of the buffer
    that the next step is given.
    """
    devices: set[Any] = {device for array in arrays.values() for device in array.sharding.device_set}
    on_cpu = all(device.platform == "cpu" for device in devices)
    if not on_cpu:
        return dict(arrays)
    return jax.block_until_ready({name: array.copy() for name, array in arrays.items()})


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Gives the OSError that TensorStore's ValueError stands for, and keeps Orbax from logging its traceback."""

    def silent(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(words in message for words in ("raised an exception", "Failed to run"))

    log = logging.getLogger("absl")
    log.addFilter(silent)
    try:
        yield
    except ValueError as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        if not found and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        code = int(found[1]) if found else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        log.removeFilter(silent)
