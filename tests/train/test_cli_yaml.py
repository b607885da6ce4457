"""What a --config file may hold wrongly beside its settings: every fault is a message that names the file."""

import pytest

from fastjax.cli import parse
from fastjax.errors import UserError
from fastjax.train.config import TrainConfig


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("output_dir: 2026-13-45", "is not YAML: month must be in 1..12"),
        ("seed: " + "9" * 5000, "is not YAML: .*digits"),
        ("output_dir: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ('output_dir: "a\\0b"', "output_dir='a.x00b' has a NUL character"),
        ("seed: 1\nseed: 2", "seed is given twice"),
    ],
)
def test_a_config_file_that_yaml_chokes_on_is_refused_by_name(text, words, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=f"run.yaml.*{words}"):
        parse(TrainConfig, ["--config", str(tmp_path / "run.yaml")])


def test_a_config_path_with_a_nul_is_refused():
    with pytest.raises(UserError, match="NUL character"):
        parse(TrainConfig, ["--config", "a\0b"])
