"""Runs fastjax's commands in children of a process that has imported everything and started nothing.

A command that is to be killed needs a process of its own, and importing takes most of a tiny run's time: here it is
done once. jax starts its backend, and its threads, in the child.

Reads one JSON object a line and answers with one:
    {"start": [module, [flag, ...]], "log": file, "folder": working folder, "limits": {name: bytes},
     "environment": {name: text}} -> {"pid": n}
    {"wait": n} -> {"code": exit code, or minus the signal that ended it}
"""

import importlib
import json
import os
import resource
import sys
from typing import Any

MODULES = (
    "fastjax.cli", "fastjax.train.run", "fastjax.train.__main__", "fastjax.generate", "fastjax.train.loop",
    "fastjax.train.data.load", "orbax.checkpoint", "grain", "transformers", "matplotlib.figure", "yaml",
)  # fmt: skip


def run(job: dict[str, Any]) -> int:
    """The command in this process, its output in the log."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, stream)
    os.chdir(job["folder"])
    os.environ.update(job.get("environment", {}))
    for name, limit in job.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    module, argv = job["start"]
    return importlib.import_module(module).main(argv)


def serve() -> None:
    for name in MODULES:
        importlib.import_module(name)
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = run(job)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
