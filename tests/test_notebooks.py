"""The notebooks run from top to bottom, show what they promise, and are stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
SHOWN = {
    "train_and_look": ("IPython.core.display.Image", "preference_accuracy", "margin", "report.html"),
    "score_and_reward": ("Qwen2_5_VLForSequenceClassification", "win rate", "brevity", "advantage"),
}


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_stored_without_outputs(name):
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_and_shows_what_it_says(name, tmp_path):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    shown = "\n".join(value for kinds in data for kind, value in kinds.items() if kind.startswith("text/"))
    assert [part for part in SHOWN[name] if part not in shown] == []
