"""From a model argument to files: folders, GGUF files, hub ids in a hand-made cache, and everything that is none."""

import shutil
from pathlib import Path

import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint import hub
from fastjax.models.checkpoint.hub import resolve_model
from fastjax.models.checkpoint.source import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds org/tiny at main: blobs, links to them, and a ref."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(hf_folder.iterdir())):
        shutil.copy(file, repository / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


def test_a_hub_id_is_found_in_the_cache_offline(hub_cache: Path, hf_folder: Path) -> None:
    checkpoint = open_checkpoint("org/tiny")
    assert checkpoint.name == "org/tiny"
    assert checkpoint.folder == hub_cache / "snapshots" / COMMIT
    assert set(checkpoint.tensors.names()) == set(open_checkpoint(str(hf_folder)).tensors.names())
    assert open_checkpoint("org/tiny", revision=COMMIT).folder == checkpoint.folder


def test_a_sharded_model_in_the_cache_is_read_through_its_links(hub_cache: Path, tiny_hf, tmp_path: Path) -> None:
    snapshot = hub_cache / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    tiny_hf().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    for file in (tmp_path / "sharded").glob("model*"):
        shutil.move(file, hub_cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert len(open_checkpoint("org/tiny").tensors.names()) == 21


def test_an_id_that_is_not_in_the_cache_names_the_offline_rule(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="org/other is not in the hub's cache, and HF_HUB_OFFLINE forbids"):
        resolve_model("org/other")
    with pytest.raises(UserError, match="not in the hub's cache"):
        resolve_model("org/tiny", revision="v2")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RepositoryNotFoundError", "not on the hub, or is private"),
        ("GatedRepoError", "accept it there and log in"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("HfHubHTTPError", "could not be fetched"),
    ],
)
def test_what_the_hub_answers_becomes_a_message(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants, errors

    def fail(*args: object, **kwargs: object) -> str:
        cls = getattr(errors, error)
        instance = cls.__new__(cls)  # their constructors want an HTTP response
        instance.args = ("the server said no",)
        raise instance

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=words) as caught:
        resolve_model("org/tiny", revision="v9")
    assert "There is no folder 'org/tiny' here either" in str(caught.value)


def test_only_safetensors_json_and_tokenizer_files_are_fetched(
    monkeypatch: pytest.MonkeyPatch, hf_folder: Path
) -> None:
    import fnmatch

    import huggingface_hub

    asked = {}

    def download(model: str, **kwargs: object) -> str:
        asked.update(kwargs)
        return str(hf_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("org/tiny")
    assert asked["allow_patterns"] == hub._ALLOWED and asked["ignore_patterns"] == hub._IGNORED

    def fetched(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in hub._ALLOWED)
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in hub._IGNORED)

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
              "tokenizer.model", "chat_template.jinja", "generation_config.json"]  # fmt: skip
    assert all(map(fetched, wanted))
    refused = ["pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "consolidated.safetensors",
               "original/params.json", "flax_model.msgpack", "weights.pkl", "model.gguf"]  # fmt: skip
    assert not any(map(fetched, refused))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "model.gguf", "org/model.gguf", "~/x y"])
def test_a_path_that_does_not_exist_never_reaches_the_hub(name: str) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        resolve_model(name)


def test_folders_and_files_that_are_no_model_say_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="empty string"):
        resolve_model("")
    with pytest.raises(UserError, match="no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(UserError, match="give .*x.gguf as the model"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter"):
        resolve_model(str(tmp_path))
    with pytest.raises(UserError, match="not a .gguf"):
        resolve_model(str(tmp_path / "adapter_config.json"))
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
