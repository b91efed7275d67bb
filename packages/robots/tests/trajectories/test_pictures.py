"""The sheet shows each trajectory from its first frame to its last, and frames become pictures of the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmrm import cli
from vlmrm_robots.trajectories.pictures import BORDER, CAPTION, DONE, NOT_DONE, SIDE, contact_sheet
from vlmrm_robots.trajectories.trajectory import Trajectory, open_folder, write_trajectory

CELL = SIDE + 2 * BORDER


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two trajectories of 30 frames as grey as their place; of the first the 20th alone is a success."""
    images = {"cam": np.arange(30, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 8, 8), dtype=np.uint8)}
    images["grey"] = images["cam"][:, :1]
    for success in (True, False):
        labels = np.zeros(30, dtype=np.float32)
        labels[20] = success
        write_trajectory(tmp_path / "positive", Trajectory(images, labels))
    return tmp_path / "positive"


def cell(sheet: Image.Image, row: int, column: int) -> tuple[tuple[int, ...], int]:
    """The border's colour of a cell and the grey in its middle."""
    left, top = column * CELL, row * (CELL + CAPTION) + CAPTION
    pixels = np.asarray(sheet)
    return tuple(map(int, pixels[top + 1, left + 1])), int(pixels[top + CELL // 2, left + CELL // 2, 0])


@pytest.mark.parametrize("key", ["cam", "grey"])
def test_a_row_spans_all_frames_and_shows_success(folder, tmp_path, key):
    sheet = Image.open(contact_sheet([open_folder(folder)], tmp_path / "new" / "sheet.png", [key], columns=4, rows=9))
    assert sheet.size == (4 * CELL, 2 * (CELL + CAPTION))
    assert [cell(sheet, 0, column) for column in range(4)] == [
        (NOT_DONE, 0),
        (NOT_DONE, 10),
        (DONE, 20),
        (NOT_DONE, 29),
    ]
    assert [cell(sheet, 1, column)[1] for column in range(4)] == [0, 10, 19, 29]


def test_positive_frames_are_written_under_their_documented_names(folder, tmp_path, capsys):
    words = ["frames", "show", str(folder), "--output", str(tmp_path / "sheet.png"), "--visualize-positive"]
    words += ["--vis-output-dir", str(tmp_path / "vis"), "--frames", str(tmp_path / "all"), "--image-key", "cam"]
    cli.app(words, result_action="return_value", exit_on_error=False)
    first, second = open_folder(folder)
    [path] = (tmp_path / "vis").iterdir()
    assert path.name == f"positive_{first.path.stem}_frame020.png"
    assert (np.asarray(Image.open(path)) == 20).all() and Image.open(path).size == (8, 8)
    assert len(list((tmp_path / "all").iterdir())) == 60
    assert (tmp_path / "all" / f"positive_{second.path.stem}_frame029.png").exists()
    assert "1 successes are in" in capsys.readouterr().out
