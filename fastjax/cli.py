"""The one place where commands read their flags, and where errors become messages and exit codes.

A command is a dataclass of settings (fastjax.settings) and a function that takes an instance of it:

    sys.exit(run_command(TrainConfig, train, prog="fastjax train", description=__doc__))

Flags are read here and tyro draws the help: so a mistake is a two-line message like every other, flags and YAML go
through one conversion, and a machine without tyro can still train.
"""

import contextlib
import dataclasses
import errno
import os
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastjax.devices import choose_platform
from fastjax.errors import DeviceMemoryError, FastjaxError, UserError, is_out_of_memory
from fastjax.settings import (
    build,
    check,
    describe,
    field_types,
    from_text,
    is_none,
    is_switch,
    metavar,
    nearest,
    rule_of,
)

T = TypeVar("T")

_SWITCHES = {
    "json": "print the result as one JSON object",
    "debug": "show the traceback of every error",
}
# What the design knows and this release does not have: {flag: way out}.
_LATER = {
    "load_in_8bit": "leave it out: --method qlora has the base in 4 bit, --method lora in 16",
}
# Of training; the other commands have a flag of this name.
_CALLED_OTHERWISE = {
    "load_in_4bit": "--method qlora, the default, reads the base in 4 bit, --method lora in 16",
}
_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
_BAD_PATH = (
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY,
    errno.EBUSY, errno.EXDEV, errno.ETXTBSY,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What every command is told beside its settings.

    Attributes:
      json: print the result as one JSON object.
      given: names of the settings that the user gave, in a flag or in --config.
    """

    json: bool = False
    given: frozenset[str] = frozenset()


def run_command(
    settings: type[T],
    command: Callable[[T, Options], None],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    passed_over: type | None = None,
) -> int:
    """Read the flags, run the command, and return the exit code.

    Args:
      passed_over: settings of another command, whose keys a `--config` file may hold too: a run's own config.yaml
        serves every command.

    0 done; 1 a fault of ours, with its traceback; 2 the user can mend it; 3 out of device memory; 4 numbers went
    wrong; 128 + signal interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        if "--help" in argv or "-h" in argv:
            return _print_help(settings, prog, description)
        choose_platform()
        with _warnings_as_notes():
            command(*parse(settings, argv, passed_over))
        return 0
    except KeyboardInterrupt:
        _report("interrupted", debug)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`... --help | head`): say nothing, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        known = as_known_error(error)
        if known is None:
            traceback.print_exc()
            return 1
        _report(str(known), debug)
        return known.exit_code


def parse(settings: type[T], argv: Sequence[str], passed_over: type | None = None) -> tuple[T, Options]:
    """The settings from the flags, over those of `--config FILE`, over the defaults.

    Raises: UserError for an unknown flag or key, a missing or unreadable value.
    """
    flags = _read_flags(settings, argv)
    values = _read_yaml(settings, flags.pop("config"), passed_over) if "config" in flags else {}
    switches = {name: bool(flags.pop(name, False)) for name in _SWITCHES}
    hints = field_types(settings)
    for name, value in flags.items():
        try:
            if isinstance(value, str):
                value = from_text(name, hints[name], value)
            values[name] = check(name, hints[name], value, rule_of(settings, name))
        except UserError as error:
            raise UserError(f"--{error}") from None
    return build(settings, values), Options(json=switches["json"], given=frozenset(values))


def as_known_error(error: BaseException) -> FastjaxError | None:
    """The error as one of fastjax.errors, or None if it is a fault of ours.

    XLA's RESOURCE_EXHAUSTED becomes DeviceMemoryError with its remedies; a full or read-only disk, and a path that the
    system refuses, become UserError.
    """
    if isinstance(error, FastjaxError):
        return error
    if is_out_of_memory(error):
        first = str(error).strip().splitlines()[0]
        return DeviceMemoryError(
            f"out of device memory: {textwrap.shorten(first, 200)}\n"
            "Read the model in 4 bit (load_in_4bit, method=qlora), make batches or max_seq_length smaller, or "
            "use a GPU with more memory"
        )
    if isinstance(error, OSError) and error.errno in _FULL_OR_READ_ONLY:
        where = f" {error.filename}" if error.filename else ""
        return UserError(f"cannot use{where}: {error.strerror}; free some space or choose a folder that can be written")
    if isinstance(error, OSError) and error.errno in _BAD_PATH and error.filename:
        return UserError(f"cannot use {error.filename}: {error.strerror}; give another path")
    return None


def _read_flags(settings: type, argv: Sequence[str]) -> dict[str, str | bool]:
    """{setting: text, or True/False of a bare switch} of the flags, spelt with underscores or dashes."""
    hints = field_types(settings)
    known = {**hints, "config": str, **dict.fromkeys(_SWITCHES, bool)}
    flags: dict[str, str | bool] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected {word!r}; every setting is a --flag, with its value after it")
        flag, has_value, text = word[2:].partition("=")
        name = flag.replace("-", "_")
        negated = name.startswith("no_") and is_switch(known.get(name[3:]))
        if name not in known and not negated:
            _refuse_later(name, f"--{flag}")
            raise UserError(f"unknown flag --{flag}{nearest(name, known, '--')}\nAll flags: --help")
        value: str | bool = text
        if negated or is_switch(known[name]):
            if has_value:
                raise UserError(f"--{flag} takes no value; write --{name} or --no_{name}")
            name, value = (name[3:], False) if negated else (name, True)
        elif not has_value:
            if not rest or re.match("--[A-Za-z]", rest[0]):
                hint = f"; write --{flag}={rest[0]} if that is the value" if rest else ""
                raise UserError(f"--{flag} has no value; it takes {describe(known[name])}{hint}")
            value = rest.pop(0)
        if name in flags:
            raise UserError(f"--{flag} is given twice; leave one of the two out")
        flags[name] = value
    return flags


def _read_yaml(settings: type, file: str | bool, passed_over: type | None = None) -> dict[str, Any]:
    """The checked values of a YAML file. Raises: UserError naming the file and the key."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """PyYAML keeps the last of two equal keys; here the second is an error."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise UserError(f"{file}: {twice[0]} is given twice; leave one of the two")
        return loader.construct_mapping(node, deep=True)

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    if "\0" in str(file):
        raise UserError(f"--config {str(file)!r} has a NUL character, which no path has; give the path of a YAML file")
    try:
        content = yaml.load(Path(str(file)).read_text(encoding="utf-8"), Loader=UniqueKeys)  # noqa: S506
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror or error}; give the path of a YAML file") from None
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"--config {file} is nested too deeply; write one `name: value` a line") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Beside its own errors, PyYAML lets out those of int() and date(): a 13th month, thousands of digits.
        raise UserError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {file} holds a {type(content).__name__}; write one `name: value` a line")
    hints, values = field_types(settings), {}
    others = {} if passed_over is None else field_types(passed_over)
    skipped: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            if name in others:
                skipped.append(name)
                continue
            _refuse_later(name, f"{file}: {key}")
            raise UserError(f"{file}: unknown key {key!r}{nearest(name, hints)}\nAll keys: the flags of --help")
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"{file}: {name}={value!r} has a NUL character, which no path and no text has")
        try:
            if isinstance(value, str) and is_none(hints[name], value):
                value = None
            if isinstance(value, str) and not _is_text(hints[name]):
                value = from_text(name, hints[name], value) if _is_collection(hints[name]) else value
            values[name] = check(name, hints[name], value, rule_of(settings, name))
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
    if skipped:
        print(f"note: {file}: settings of training alone are passed over: {', '.join(skipped)}", file=sys.stderr)
    return values


def _refuse_later(name: str, given: str) -> None:
    """Raises: UserError for a setting that only a later release has, or that is called otherwise here."""
    if name in _CALLED_OTHERWISE:
        raise UserError(f"{given} is no setting of this command; {_CALLED_OTHERWISE[name]}")
    if name in _LATER:
        raise UserError(f"{given} is not in this release; {_LATER[name]}")


def _is_text(hint: Any) -> bool:
    return hint in (str, str | None)


def _is_collection(hint: Any) -> bool:
    return any(word in str(hint) for word in ("tuple", "dict"))


def _print_help(settings: type, prog: str, description: str) -> int:
    """Let tyro draw the help: one flag a setting, with its type, default and help text."""
    import tyro

    hints = field_types(settings)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(settings):
        if not field.init:
            continue
        default = {} if field.default is dataclasses.MISSING else field.default
        arg = tyro.conf.arg(help=field.metadata.get("help", ""), metavar=metavar(hints[field.name]) or None)
        if default == "":
            # Empty only so that --config may bring it: what has no default is shown as required.
            fields.append((field.name, Annotated[str, arg], dataclasses.MISSING))
        elif is_switch(hints[field.name]):
            fields.append((field.name, Annotated[hints[field.name], arg], default))
        else:
            fields.append((field.name, Annotated[str, arg], "none" if default in (None, {}) else str(default)))
    config = tyro.conf.arg(
        help="YAML file of settings; flags win over it, and --NAME none (or null) unsets one", metavar="FILE"
    )
    fields.append(("config", Annotated[str, config], "none"))
    for name, text in _SWITCHES.items():
        fields.append((name, Annotated[bool, tyro.conf.arg(help=text)], False))
    drawn = dataclasses.make_dataclass(
        "Settings", [(n, t, dataclasses.field(default=d)) for n, t, d in fields], kw_only=True
    )
    try:
        tyro.cli(drawn, args=["--help"], prog=prog, description=description, use_underscores=True)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Warnings as one line each on stderr, without the line of code they come from."""
    with warnings.catch_warnings():
        # A note stays a note in a Python that is told to make errors of warnings.
        warnings.filterwarnings("default", category=UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        yield


def _report(message: str, debug: bool) -> None:
    """The message on stderr, under its traceback with --debug."""
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
