"""What a compiled step sends between devices, read from its text."""

import math
import re
from collections import Counter

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|async_execution_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collective_bytes(text: str) -> dict[tuple[str, str], int]:
    """(kind, dtype) -> bytes of the whole arrays that one device's collectives of this kind give in one run.

    An all-gather counts what is there after it, an all-reduce its array, a reduce-scatter what goes in. The body of a
    loop counts as often as it runs, where the compiler knows how often, else once; of branches the dearest counts.

    Args:
      text: of a compiled program, `compiled.as_text()`.
    """
    computations, entry = _computations(text)
    done: dict[str, Counter[tuple[str, str]]] = {}

    def total(name: str) -> Counter[tuple[str, str]]:
        if name not in done:
            done[name] = Counter()
            for line in computations.get(name, []):
                done[name].update(_of_line(line))
        return done[name]

    def _of_line(line: str) -> Counter[tuple[str, str]]:
        found = _INSTRUCTION.match(line)
        if not found:
            return Counter()
        operation = found["op"].removesuffix("-start")
        if operation in _KINDS:
            return _sent(operation, found["type"], line)
        if found["op"] == "while":
            times = int(trips[1]) if (trips := _TRIPS.search(line)) else 1
            body = _CALLED.search(line.replace("condition=", "_="))
            return Counter({key: times * size for key, size in total(body[1]).items()}) if body else Counter()
        branches = _BRANCHES.search(line)
        if branches:
            of_each = [total(name.strip().lstrip("%")) for name in branches[1].split(",")]
            return max(of_each, key=lambda counts: sum(counts.values()))
        if operation in ("all-reduce", "reduce", "sort", "scatter", "map", "reduce-window", "select-and-scatter"):
            return Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for name in _CALLED.findall(line):
            counts.update(total(name))
        return counts

    return dict(total(entry))


def _sent(kind: str, type_text: str, line: str) -> Counter[tuple[str, str]]:
    arrays = [(found["dtype"], _size(found["shape"])) for found in _ARRAY.finditer(type_text)]
    if f"{kind}-start(" in line and kind != "all-reduce":
        # ((operands), (results)): as many of the one as of the other.
        arrays = arrays[len(arrays) // 2 :]
    counts: Counter[tuple[str, str]] = Counter()
    for dtype, size in arrays:
        counts[kind, dtype] += size * _BYTES.get(dtype, 4) * (_group_size(line) if kind == "reduce-scatter" else 1)
    return counts


def _group_size(line: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(iota[1]) if iota else 1


def _size(shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation by its name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif current:
            computations[current].append(line)
    return computations, entry
