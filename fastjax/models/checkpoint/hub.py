"""From a model argument to files: a folder, a .gguf file, or a hub id fetched through huggingface_hub."""

import os
import re
from pathlib import Path

from fastjax.errors import UserError
from fastjax.models.values import shown

# Weights as safetensors only: no pickle and no Python file is ever fetched.
_ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt"]
# Second copies of the weights in other layouts.
_IGNORED = ["consolidated*", "original/*", "onnx/*", "openvino/*", "gguf/*"]

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The HF folder or .gguf file that `model` leads to; a hub id is fetched (or found in the hub's cache).

    Args:
      model: path of a folder with config.json, path of a .gguf file, or a hub id such as `org/name`.
      revision: branch, tag or commit; only for a hub id.
    Raises: UserError if it is none of these, saying which of them was tried.
    """
    if not model:
        raise UserError("the model is an empty string: give a folder, a .gguf file or a hub id")
    # os.path, because pathlib raises for names that are too long, for unknown users and behind closed folders.
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise _not_a_model(path)
        return path
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise UserError(f"{model} is a file and not a .gguf; give the folder that holds it and config.json")
        return path
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise UserError(f"{shown(model, 300)}: no such file or folder")
    return _fetch(model, revision)


def _not_a_model(path: Path) -> UserError:
    if (path / "adapter_config.json").is_file():
        return UserError(f"{path} is an adapter; give its base model as the model and this folder as the adapter")
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        return UserError(f"{path} has no config.json; to use its GGUF file, give {ggufs[0]} as the model")
    return UserError(f"{path} has no config.json, so it is not a model folder")


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    local = f"There is no folder {model!r} here either."
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED)
    except errors.GatedRepoError as error:
        raise UserError(f"{model} on the hub asks for an agreement: accept it there and log in. {local}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model} on the hub has no revision {revision!r}. {local}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{model} is not on the hub, or is private and you are not logged in. {local}") from error
    except errors.HFValidationError as error:
        raise UserError(f"{model} is not a hub id ({error}). {local}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(f"{model} is not in the hub's cache, and {_why_offline()}. {local}") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise UserError(f"{model} could not be fetched from the hub: {_first_line(error)}. {local}") from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise _not_a_model(path)
    return path


def _why_offline() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids fetching it"
    return "the hub cannot be reached"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
