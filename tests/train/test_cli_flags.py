"""How commands read their flags and --config, and which exit code an error gets."""

import dataclasses
import errno
import subprocess
import sys
import warnings
from typing import Literal

import pytest

from fastjax.cli import Options, as_known_error, parse, run_command
from fastjax.errors import DeviceMemoryError, Interrupted, NumericsError, UserError
from fastjax.settings import setting
from fastjax.train.config import TrainConfig


@dataclasses.dataclass
class Small:
    """A command's settings, one of each kind."""

    name: str = setting("", "a text")
    count: int = setting(1, "a count", minimum=1)
    rate: float = setting(0.5, "a rate", minimum=0, below=1)
    kind: Literal["red", "blue"] = setting("red", "a kind", later={"green": "use red"})
    fast_mode: bool = setting(False, "a switch")
    limit: int | None = setting(None, "a limit", minimum=1)
    targets: str | tuple[str, ...] = setting("all-linear", "names")
    layers: tuple[int, ...] | None = setting(None, "layers")
    ranks: dict[str, int] = setting({}, "ranks")


def read(*argv: str) -> Small:
    return parse(Small, argv)[0]


def test_flags_take_underscores_or_dashes_and_bare_booleans():
    small = read("--fast-mode", "--count", "3", "--rate=1e-3", "--name", "two words")
    assert small == Small(name="two words", count=3, rate=1e-3, fast_mode=True)
    assert read("--no_fast_mode").fast_mode is False
    assert read("--name=--dashes").name == "--dashes"
    assert read("--rate", "0", "--limit", "none").limit is None
    assert read("--limit", "null", "--name", "null") == Small(name="null")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("all-linear", "all-linear"),
        ("q_proj", ("q_proj",)),
        ("q_proj, mlp.up_proj", ("q_proj", "mlp.up_proj")),
        (r".*\.0\..*(q|v)_proj", r".*\.0\..*(q|v)_proj"),
    ],
)
def test_a_comma_list_is_names_and_anything_else_a_regex(text, value):
    assert read("--targets", text).targets == value


def test_lists_of_numbers_and_json_mappings():
    small = read("--layers", "0,2", "--ranks", '{"q_proj": 8}')
    assert small.layers == (0, 2) and small.ranks == {"q_proj": 8}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cuont", "3"], ["unknown flag --cuont", "did you mean --count?"]),
        (["--coun", "3"], ["unknown flag --coun", "--count"]),
        (["--count"], ["--count has no value", "a whole number"]),
        (["--name", "--count", "3"], ["--name has no value"]),
        (["--count", "three"], ["--count='three' is not a whole number"]),
        (["--count", "0"], ["--count=0", "1 or more"]),
        (["--rate", "1"], ["--rate=1.0", "less than 1"]),
        (["--rate", "nan"], ["--rate=nan", "finite"]),
        (["--kind", "rad"], ["--kind='rad'", "red, blue", "did you mean red?"]),
        (["--kind", "green"], ["--kind='green' is not in this release", "use red"]),
        (["--fast_mode=yes"], ["--fast_mode takes no value"]),
        (["--count", "1", "--count", "2"], ["--count is given twice"]),
        (["--layers", "a,b"], ["--layers=", "list of whole numbers"]),
        (["--ranks", "q_proj=8"], ["--ranks=", "mapping"]),
        (["--ranks", '{"q_proj": "8"}'], ["--ranks=", "mapping"]),
        (["train.jsonl"], ["unexpected 'train.jsonl'"]),
        (["--load_in_8bit", "--count", "2"], ["--load_in_8bit is not in this release", "--method qlora"]),
        (["--load_in_4bit"], ["--load_in_4bit is no setting of this command", "--method qlora"]),
        (["--config", "missing.yaml"], ["missing.yaml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv, words):
    with pytest.raises(UserError) as error:
        read(*argv)
    for word in words:
        assert word in str(error.value)


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "count: 5\nrate: 2e-4\nfast-mode: true\ntargets: [q_proj, v_proj]\nranks: {q_proj: 8}\nlimit: null\n"
    )
    small, options = parse(Small, ["--config", str(file), "--count", "7", "--no_fast_mode", "--json"])
    assert small == Small(count=7, rate=2e-4, targets=("q_proj", "v_proj"), ranks={"q_proj": 8})
    assert options == Options(json=True, given=frozenset({"count", "rate", "fast_mode", "targets", "ranks", "limit"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuont: 3", ["unknown key 'cuont'", "did you mean count?"]),
        ("load_in_8bit: true", ["load_in_8bit is not in this release"]),
        ("count: three", ["count='three' is not a whole number"]),
        ("count: '3'", ["count='3' is not a whole number"]),
        ("count: 3.5", ["count=3.5 is not a whole number"]),
        ("count: true", ["count=True is not a whole number"]),
        ("name: 3", ["name=3 is not a text"]),
        ("fast_mode: 'yes'", ["fast_mode='yes' is not true or false"]),
        ("layers: [0, one]", ["layers=", "list of whole numbers"]),
        ("count: 1\ncount: 2", ["count is given twice"]),
        ("- count", ["holds a list"]),
        ("count: [1", ["is not YAML"]),
    ],
)
def test_a_wrong_config_file_is_refused_by_file_and_key(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        read("--config", str(file))
    for word in ["run.yaml", *words]:
        assert word in str(error.value)


def test_none_and_null_unset_a_key_of_the_config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("limit: 3\nlayers: none\n")
    for word in ("none", "null", "NULL"):
        small, options = parse(Small, ["--config", str(file), "--limit", word])
        assert small == Small() and options.given == {"limit", "layers"}


def test_settings_of_training_in_the_config_of_another_command_are_named_and_passed_over(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("count: 5\noutput_dir: runs/a\nlearning_rate: three\n")
    small, options = parse(Small, ["--config", str(file)], passed_over=TrainConfig)
    assert small == Small(count=5) and options.given == {"count"}
    note = capsys.readouterr().err
    assert note == f"note: {file}: settings of training alone are passed over: output_dir, learning_rate\n"
    with pytest.raises(UserError, match="unknown key 'output_dir'"):
        parse(Small, ["--config", str(file)])


class XlaRuntimeError(RuntimeError):
    """Carries the name that jaxlib gives its errors."""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("mend me"), 2, ["error: mend me"]),
        (DeviceMemoryError("too big"), 3, ["error: too big"]),
        (XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99"), 3, ["method=qlora", "max_seq_length"]),
        (NumericsError("loss is nan"), 4, ["error: loss is nan"]),
        (Interrupted("state saved", 15), 143, ["error: state saved"]),
        (KeyboardInterrupt(), 130, ["error: interrupted"]),
        (OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"), 2, ["run/metrics.jsonl", "No space"]),
        (OSError(errno.EROFS, "Read-only file system", "run"), 2, ["run", "Read-only"]),
        (ZeroDivisionError("ours"), 1, ["Traceback", "ZeroDivisionError: ours"]),
    ],
)
def test_each_kind_of_error_has_its_exit_code(capsys, error, code, words):
    def command(settings: Small, options: Options) -> None:
        raise error

    assert run_command(Small, command, [], prog="small", description="") == code
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in words:
        assert word in printed.err
    if code != 1:
        assert "Traceback" not in printed.err and len(printed.err.splitlines()) <= 3
        run_command(Small, command, ["--debug"], prog="small", description="")
        assert "Traceback" in capsys.readouterr().err


def test_other_runtime_errors_stay_what_they_are():
    assert as_known_error(XlaRuntimeError("INTERNAL: something")) is None
    assert as_known_error(OSError(errno.EIO, "Input/output error")) is None


def test_warnings_are_one_line_notes(capsys):
    def command(settings: Small, options: Options) -> None:
        warnings.warn("the rows are few", stacklevel=1)

    assert run_command(Small, command, [], prog="small", description="") == 0
    assert capsys.readouterr().err == "note: the rows are few\n"


def test_help_names_every_setting_and_exits_0(capsys):
    assert run_command(TrainConfig, lambda *_: None, ["--help"], prog="fastjax train", description="Tune") == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name}" in text
    assert "lora|full" in text and "--config" in text and "--json" in text
    assert "none (or null)" in text and "default: ''" not in text and text.count("(required)") == 3


def test_a_wrong_flag_in_a_real_process_exits_2_without_loading_jax():
    code = (
        "import sys\nfrom fastjax.cli import run_command\nfrom fastjax.train.config import TrainConfig\n"
        "code = run_command(TrainConfig, lambda *_: None, sys.argv[1:], prog='p', description='')\n"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--lora_rank", "8"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "error: unknown flag --lora_rank; did you mean --lora_r?"
