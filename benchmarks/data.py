"""The data pipeline alone, without a model: tokenising, the first batch from a warm cache, batches padded and packed.

    python benchmarks/data.py --model DIR|FILE.gguf --data rows.jsonl --rows 100000

Rows are repeated, each with a number of its own, until there are as many as asked for.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.train.data import PackedRows, load_dataset, train_batches
from fastjax.train.data.readers import read_rows
from fastjax.train.data.rows import parse_columns


def enlarge(source: str, count: int, path: Path) -> None:
    """A JSONL file of `count` rows, those of the source again and again; no two are equal."""
    rows = [row for row, _ in read_rows(source)]
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(itertools.islice(itertools.cycle(rows), count)):
            first = next(key for key, value in row.items() if isinstance(value, str))
            file.write(json.dumps({**row, first: f"{row[first]} ({number})"}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--data_columns")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--max_seq_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long batches are made")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm:
        print(json.dumps(warm(arguments, Path(arguments.warm))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        enlarge(arguments.data, arguments.rows, path)
        size = path.stat().st_size / 2**20
        print(f"{arguments.rows:,} rows, {size:.0f} MiB of JSONL, {len(os.sched_getaffinity(0))} cores")
        for processes in dict.fromkeys(arguments.processes):
            begin = time.perf_counter()
            rows = load(arguments, path, Path(folder) / str(processes), processes)
            seconds = time.perf_counter() - begin
            tokens = rows.report.num_tokens
            print(f"tokenise, {processes} process(es)   {tokens / seconds:>12,.0f} tokens/s   ({seconds:.1f} s)")
        # A process of its own: its start, and its peak of memory, are those of a run.
        cache = Path(folder) / str(arguments.processes[0])
        command = [sys.executable, *sys.argv, "--data", str(path), "--warm", str(cache)]
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"first batch, warm cache    {found['first_s']:>12.1f} s after the process began")
        for name in ("padded", "packed"):
            one = found[name]
            speed, fill = one["tokens"] / one["seconds"], 100 * one["fill"]
            note = f"{fill:.1f} % of up to {one['width']} a row filled, plan and first batch {one['plan_s']:.2f} s"
            print(f"batches, {name}            {speed:>12,.0f} tokens/s   ({note})")
        print(f"peak memory                {found['peak_mib']:>12,.0f} MiB")


def load(arguments, path, cache, processes):
    tokenizer = load_tokenizer(arguments.model)
    columns = parse_columns(arguments.data_columns)
    return load_dataset(
        str(path), tokenizer, max_seq_length=arguments.max_seq_length, columns=columns, cache=cache, num_proc=processes
    )


def warm(arguments, cache):
    """What a run's process does once the data are tokenised, timed."""
    began = time.time() - _age_s()
    rows = load(arguments, arguments.data, cache, 1)
    found = {}
    for name in ("padded", "packed"):
        begin = time.perf_counter()
        source = PackedRows(rows, arguments.max_seq_length, 0) if name == "packed" else rows
        with train_batches(source, batch_size=arguments.batch_size, seed=0) as batches:
            next(batches)
            found.setdefault("first_s", time.time() - began)
            plan, begin, tokens, slots = time.perf_counter() - begin, time.perf_counter(), 0, 0
            while time.perf_counter() - begin < arguments.seconds:
                segments = next(batches)["segment_ids"]
                tokens, slots = tokens + int((segments > 0).sum()), slots + segments.size
            found[name] = {
                "tokens": tokens,
                "seconds": time.perf_counter() - begin,
                "fill": tokens / slots,
                "width": batches.widths[-1],
                "plan_s": plan,
            }
    return {**found, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _age_s() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
