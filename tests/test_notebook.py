"""examples/train_on_own_rows.ipynb runs from the first to the last cell."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "train_on_own_rows.ipynb"


@pytest.mark.slow
def test_notebook_runs_and_ends_with_an_answer_and_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))  # ".." of the notebook's own folder
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (tmp_path / "colours.jsonl").symlink_to(NOTEBOOK.parent / "colours.jsonl")
    for cell in notebook.cells:  # the whole run takes some minutes
        cell.source = cell.source.replace("max_steps=40", "max_steps=2")

    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()

    *_, answer, folder = (
        output.data["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result"
    )
    assert len(answer) > len("''")
    assert folder == "PosixPath('colours-model')"
    assert (tmp_path / "colours-model" / "model.safetensors").is_file()
