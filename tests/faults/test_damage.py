"""Files cut short, with a bit flipped or gone: a checkpoint is passed over by name, an adapter or model is refused."""

import shutil
from pathlib import Path

import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.models.config import ModelConfig
from fastjax.models.peft_io import load_adapter
from fastjax.train.files import files_below
from fastjax.train.state import CheckpointStore


def cut(file: Path) -> None:
    """Leaves the first half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path, at: int | None = None) -> None:
    """Turns one bit over, in the middle if it is not said where."""
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2 if at is None else at] ^= 4
    file.write_bytes(contents)


HARMS = {"cut": cut, "flip": flip, "empty": lambda file: file.write_bytes(b""), "gone": Path.unlink}


@pytest.fixture(scope="module")
def run_folder(server, settings, tmp_path_factory):
    """A run stopped in front of its end, with the checkpoints 1 and 2 of 3."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    code, output = server.run({**settings, "output_dir": folder, "max_steps": 2})
    assert code == 0, output
    return folder


@pytest.mark.parametrize("harm", HARMS)
def test_every_file_of_a_checkpoint_is_watched_and_the_one_before_is_used(run_folder, tmp_path, harm):
    names = [str(file.relative_to(run_folder / "checkpoints/2")) for file in files_below(run_folder / "checkpoints/2")]
    names.remove("result.json")
    assert len(names) > 5 and "checkpoint.json" in names
    for number, name in enumerate(names):
        folder = Path(shutil.copytree(run_folder / "checkpoints", tmp_path / str(number)))
        if harm == "empty" and not (folder / "2" / name).stat().st_size:
            continue
        HARMS[harm](folder / "2" / name)
        newest, complaints = CheckpointStore(folder).newest()
        assert newest == folder / "1"
        assert len(complaints) == 1 and complaints[0].startswith(f"{folder / '2'}: {name} ")


def test_a_resumed_command_names_the_damaged_file_and_goes_on_from_the_one_before(
    run_folder, server, settings, tmp_path
):
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    file = max(files_below(folder / "checkpoints/2/arrays"), key=lambda path: path.stat().st_size)
    flip(file)
    code, output = server.run({**settings, "output_dir": folder, "max_steps": 2, "resume": "auto"})
    assert code == 0, output
    name = file.relative_to(folder / "checkpoints/2")
    assert f"passed over a damaged checkpoint: {folder}/checkpoints/2: {name}" in output
    assert f"going on from {folder}/checkpoints/1 (step 1 of 2)" in output
    adapter = "adapter/adapter_model.safetensors"
    assert (folder / adapter).read_bytes() == (run_folder / adapter).read_bytes()
    for step in (1, 2):
        flip(folder / f"checkpoints/{step}/checkpoint.json")
    code, output = server.run({**settings, "output_dir": folder, "max_steps": 2, "resume": "auto"})
    assert code == 2 and "no whole checkpoint is left" in output and "Traceback" not in output


def open_model(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    ModelConfig.from_hf(checkpoint.config)
    load_tokenizer(checkpoint)
    load_model(checkpoint, "float32")


@pytest.mark.parametrize("harm", ["cut", "empty", "gone"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_model_is_refused_by_name(model_folder, copy_of, name, harm):
    if (name, harm) == ("generation_config.json", "gone"):
        pytest.skip("a model may lack it")
    folder = copy_of(model_folder)
    HARMS[harm](folder / name)
    with pytest.raises(UserError, match=name):
        open_model(folder)


@pytest.mark.parametrize("harm", ["cut", "empty", "gone"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused_by_name(model_folder, adapter_folder, copy_of, name, harm):
    folder = copy_of(adapter_folder)
    HARMS[harm](folder / name)
    model = load_model(open_checkpoint(str(model_folder)), "float32")
    with pytest.raises(UserError, match=name):
        load_adapter(model, folder)


def test_a_flipped_bit_in_any_tensor_of_an_adapter_is_refused_with_file_and_tensor(
    model_folder, adapter_folder, copy_of
):
    from safetensors import safe_open

    model = load_model(open_checkpoint(str(model_folder)), "float32")
    with safe_open(adapter_folder / "adapter_model.safetensors", "np") as file:
        names = sorted(file.keys())
    size = (adapter_folder / "adapter_model.safetensors").stat().st_size
    assert len(names) == 8
    for at in range(size - 1, size - 1000, -97):
        folder = copy_of(adapter_folder)
        flip(folder / "adapter_model.safetensors", at)
        with pytest.raises(UserError, match=r"adapter_model.safetensors: .*lora_[AB].weight is not as it was written"):
            load_adapter(model, folder)


def test_a_flipped_bit_in_the_weights_of_a_model_that_we_wrote_is_refused(model_folder, tmp_path):
    from fastjax.models.checkpoint.save import save_model

    checkpoint = open_checkpoint(str(model_folder))
    save_model(load_model(checkpoint, "float32"), tmp_path / "ours", tokenizer=load_tokenizer(checkpoint))
    open_model(tmp_path / "ours")
    flip(tmp_path / "ours" / "model.safetensors", -5000)
    with pytest.raises(UserError, match=r"model.safetensors: \S+ is not as it was written"):
        open_model(tmp_path / "ours")


@pytest.mark.parametrize("which", ["model", "adapter"])
def test_a_flip_in_any_byte_of_a_header_is_refused_or_harmless(model_folder, adapter_folder, copy_of, which):
    """No byte of a header, flipped, makes a traceback; what is read in spite of it was not in that byte."""
    source = {"model": model_folder, "adapter": adapter_folder}[which]
    name = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}[which]
    from fastjax.models.checkpoint.safetensors_io import SafetensorsFile

    folder = copy_of(source)
    whole = (folder / name).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    refused = 0
    for at in range(0, 8 + length, 3):
        flip(folder / name, at)
        try:
            file = SafetensorsFile(folder / name)
            for tensor in file.names():
                file.read(tensor)
        except UserError as error:
            assert name in str(error)
            refused += 1
        (folder / name).write_bytes(whole)
    assert refused > length // 12
