"""The notebooks run from top to bottom, show what they promise, and are stored without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
SHOWN = {
    "train_and_look": ("IPython.core.display.Image", "preference_accuracy", "margin", "report.html"),
    "score_and_reward": ("Qwen2_5_VLForSequenceClassification", "win rate", "brevity", "advantage"),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_says(path, tmp_path):
    """Two steps of training, and few rows, are as good as many to show that."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count] == []
    for cell in cells:
        cell.source = re.sub(r"(max_steps|warmup_steps|eval_steps|save_steps)=\d+", r"\1=2", cell.source)
        cell.source = re.sub(r"max_eval_samples=\d+", "max_eval_samples=20", cell.source)

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)

    data = [output.get("data", {}) for cell in cells for output in cell.outputs]
    shown = "\n".join(value for kinds in data for kind, value in kinds.items() if kind.startswith("text/"))
    assert [part for part in SHOWN[path.stem] if part not in shown] == []
