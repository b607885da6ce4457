"""Data sets that `datasets` loads: hub ids, and folders that it has saved or that have a data set's card.

Whether the hub can be reached is found out once, instead of by minutes of retries.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastjax.errors import UserError

# Seconds that the hub has to answer.
_PATIENCE_S = 5.0


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` made the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def has_dataset_card(folder: Path) -> bool:
    """Whether a README.md says which files are which split, as hub data sets do."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    return head.startswith("---") and "\nconfigs:" in head


def read_with_datasets(
    name: str, split: str | None, config: str | None, kinds: Sequence[str]
) -> Iterator[tuple[Any, str]]:
    """Pairs (row, place) of one split. Raises: UserError if it cannot be loaded; `kinds` are the files known here."""
    for number, row in enumerate(load_split(name, split, config, kinds), start=1):
        yield row, f"{name}: row {number}"


def load_split(name: str, split: str | None, config: str | None, kinds: Sequence[str]) -> Any:
    """The `datasets.Dataset` of one split, mapped from disk; `split` None is train."""
    import datasets

    path = Path(name)
    why = None
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(name) if is_saved_dataset(path) else datasets.load_dataset(name, config)
        else:
            with offline_if_unreachable() as why:
                loaded = datasets.load_dataset(name, config)
    except Exception as error:  # noqa: BLE001 - datasets raises its own, the hub's, pyarrow's and builtin errors alike
        if why is not None:
            raise UserError(
                f"{name}: no such data file or folder, nor a data set in the hub's cache, and {why}; "
                "check the path, or fetch the data set where the hub can be reached"
            ) from None
        raise UserError(
            f"{name}: neither a data file nor a data set that `datasets` can load ({type(error).__name__}: "
            f"{_first_line(error)}); give a {', '.join(kinds)} file, a folder of them, or a hub id owner/name"
        ) from None
    wanted = split or "train"
    if isinstance(loaded, datasets.DatasetDict):
        if wanted not in loaded:
            splits = ", ".join(map(str, loaded))
            raise UserError(f"{name}: has no {wanted} split, only {splits}; write {name}:SPLIT")
        return loaded[wanted]
    if split not in (None, "train"):
        raise UserError(f"{name}: is one split without a name; leave :{split} out")
    return loaded


@contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Within it, `datasets` asks the hub only if the hub answers, and else looks into the hub's cache alone.

    Yields: why the hub is not asked, or None if it is.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE forbids asking the hub"
        return
    if _hub_answers():
        yield None
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield f"the hub ({constants.ENDPOINT}) cannot be reached"
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session

    try:
        # The library's own session, so that proxies and certificates are those of the download.
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # noqa: BLE001 - the HTTP library below, whose name has changed, raises its own
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
