"""Tokenised documents on disk: written as they come, read back as mapped files.

tokens.bin      int32, the ids of all documents end to end
mask.bin        bool, one a token: whether it is a target
documents.bin   one record of dtype DOCUMENT a document
report.json     the report, the fingerprint and the sizes of the other files; written last
"""

import json
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastjax.train.data.dataset import DOCUMENT, Digests, TokenisedDataset
from fastjax.train.data.report import DataReport

_FILES = {"tokens.bin": np.dtype(np.int32), "mask.bin": np.dtype(bool), "documents.bin": DOCUMENT}
REPORT = "report.json"


class TokenWriter:
    """Appends documents to the files of a folder, or to unnamed temporary files that end with the process."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: list[IO[bytes]] = [_new_file(folder, name) for name in _FILES]
        self._digests = Digests()

    def add(self, input_ids: np.ndarray, loss_mask: np.ndarray, documents: np.ndarray) -> None:
        """Args: input_ids [N], loss_mask [N], documents [D] of dtype DOCUMENT, whose lengths add up to N."""
        for file, dtype, array in zip(self._files, _FILES.values(), (input_ids, loss_mask, documents), strict=True):
            file.write(np.ascontiguousarray(array, dtype).data)
        self._digests.update(input_ids, loss_mask, documents)

    def finish(self, report: DataReport) -> TokenisedDataset:
        """The data set of all that was added; the report is completed with its counts."""
        for file in self._files:
            file.flush()
        ids, mask, documents = (_mapped(file, dtype) for file, dtype in zip(self._files, _FILES.values(), strict=True))
        report.describe(documents)
        fingerprint = self._digests.result()
        if self._folder is not None:
            sizes = {name: (self._folder / name).stat().st_size for name in _FILES}
            content = {"report": report.to_dict(), "fingerprint": fingerprint, "sizes": sizes}
            (self._folder / REPORT).write_text(json.dumps(content), encoding="utf-8")
        self.close()
        return TokenisedDataset.from_arrays(ids, mask, documents, report, fingerprint)

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_store(folder: Path) -> TokenisedDataset | None:
    """The data set that a folder holds, mapped; None if it holds none that is whole."""
    try:
        content: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if any((folder / name).stat().st_size != size for name, size in content["sizes"].items()):
            return None
        report, fingerprint = DataReport.from_dict(content["report"]), str(content["fingerprint"])
        arrays = []
        for name, dtype in _FILES.items():
            with (folder / name).open("rb") as file:
                arrays.append(_mapped(file, dtype))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    ids, mask, documents = arrays
    return TokenisedDataset.from_arrays(ids, mask, documents, report, fingerprint)


def _new_file(folder: Path | None, name: str) -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="fastjax-") if folder is None else (folder / name).open("x+b")


def _mapped(file: IO[bytes], dtype: np.dtype) -> np.ndarray:
    file.seek(0, 2)
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r") if file.tell() else np.zeros(0, dtype)
