"""Pieces of rows shared out to processes, their documents taken back in order.

The processes are plain `python -m fastjax.train.data.worker`, and not multiprocessing's: those would run a user's
script again from its top.
"""

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.train.data.chunk import Chunk, RowOptions, make_chunk
from fastjax.train.data.readers import Placed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# With fewer pieces a process would be done before it has imported what it needs.
WORTHWHILE_PIECES = 20


def make_chunks(
    pieces: Iterator[list[Placed]],
    tokenizer: "PreTrainedTokenizerBase",
    options: RowOptions,
    num_proc: int | None,
) -> Iterator[Chunk]:
    """The chunk of each piece, in order.

    Args:
      num_proc: processes; 1 is this one alone, None one a core if there are enough pieces.
    Raises: UserError as `make_chunk`.
    """
    wanted = num_proc or len(os.sched_getaffinity(0))
    first: list[list[Placed]] = []
    if num_proc is None and wanted > 1:
        first = list(itertools.islice(pieces, WORTHWHILE_PIECES))
        wanted = wanted if len(first) == WORTHWHILE_PIECES else 1
    pieces = itertools.chain(first, pieces)
    if wanted == 1:
        yield from (make_chunk(piece, tokenizer, options) for piece in pieces)
        return
    workers: list[_Worker] = []
    try:
        for _ in range(wanted):
            workers.append(_Worker(tokenizer, options))
        yield from _shared_out(pieces, workers)
    finally:
        for worker in workers:
            worker.end()


def _shared_out(pieces: Iterator[list[Placed]], workers: list["_Worker"]) -> Iterator[Chunk]:
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def work(piece: list[Placed]) -> Chunk:
        worker = free.get()
        try:
            return worker.make(piece)
        finally:
            free.put(worker)

    pending: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(len(workers)) as threads:
        try:
            for piece in pieces:
                pending.append(threads.submit(work, piece))
                # Bounded, so that memory does not grow where reading is faster than tokenising.
                if len(pending) > 2 * len(workers):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            if pending:  # the threads that are still at it wait for processes that nobody needs any more
                for worker in workers:
                    worker.end()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: RowOptions) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastjax.train.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One process a core already; and no accelerator is touched.
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"},
        )
        try:
            _send(self._pipes()[0], (tokenizer, options))
        except BrokenPipeError:
            error = self._ended()
            self.end()
            raise error from None

    def make(self, piece: list[Placed]) -> Chunk:
        """The chunk that the process makes of the piece. Raises: UserError as `make_chunk`, or if the process ended."""
        to_process, from_process = self._pipes()
        try:
            _send(to_process, piece)
            answer: Any = pickle.load(from_process)
        except (BrokenPipeError, EOFError):
            raise self._ended() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _ended(self) -> UserError:
        return UserError(
            f"a process that tokenises ended with code {self._process.wait()}; its message is above. Was the memory "
            "full? dataset_num_proc=1 does without such processes"
        )


def _send(pipe: IO[bytes], value: Any) -> None:
    pickle.dump(value, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()
