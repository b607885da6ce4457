"""A process of `workers`: pieces of rows come by stdin, their chunks go by stdout, both pickled."""

import os
import pickle
import signal
import sys

from fastjax.errors import UserError
from fastjax.train.data.chunk import make_chunk


def main() -> None:
    # Ctrl-C goes to the whole group; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between the chunks
    tokenizer, options = pickle.load(source)
    while True:
        try:
            piece = pickle.load(source)
        except EOFError:
            return
        try:
            answer: object = make_chunk(piece, tokenizer, options)
        except UserError as error:
            answer = error
        pickle.dump(answer, sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()


if __name__ == "__main__":
    main()
