"""The notebook runs from top to bottom, offline, through `import fastjax` alone, and its model learns."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    """The notebook after a run of all its cells, and of one that tells whether torch is loaded."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\n'torch' in sys.modules"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(env=environment)
    return notebook


def printed(notebook: nbformat.NotebookNode, words: str) -> str:
    """The text that the one cell with these words in its source printed or gave back."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    streams = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    results = "".join(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result")
    return streams + results


def test_the_trained_model_answers_in_the_taught_form(notebook: nbformat.NotebookNode) -> None:
    answers = printed(notebook, "zip(questions").splitlines()
    assert len(answers) == 6
    assert 'What colour is a lemon? {"colour": "yellow"}' in answers
    assert "yellow" not in printed(notebook, "before training")


def test_the_saved_adapter_answers_the_same(notebook: nbformat.NotebookNode) -> None:
    assert printed(notebook, "again.generate") == """'{"colour": "white"}'"""


def test_the_loss_is_drawn(notebook: nbformat.NotebookNode) -> None:
    (cell,) = [cell for cell in notebook.cells if "plt.plot" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_kernel_never_has_torch(notebook: nbformat.NotebookNode) -> None:
    assert printed(notebook, "sys.modules") == "False"


def test_the_notebook_uses_only_the_public_names() -> None:
    sources = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    text = "\n".join(sources)
    assert "import fastjax\n" in text
    assert "from fastjax" not in text and "import fastjax." not in text
