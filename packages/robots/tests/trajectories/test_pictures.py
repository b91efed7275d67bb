"""The sheet shows each trajectory from its first frame to its last, and frames become pictures of the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmrm import cli
from vlmrm.errors import ConfigError, DataError
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


def test_words_of_a_caption_stand_apart(folder, tmp_path):
    sheet = Image.open(contact_sheet([open_folder(folder)], tmp_path / "sheet.png", ["cam"], columns=5, rows=1))
    empty = (np.asarray(sheet.convert("L"))[:CAPTION] > 200).all(axis=0)  # columns of pixels
    gaps = [len(gap) for gap in "".join(map(str, empty.astype(int))).strip("1").split("0") if gap]
    assert sum(gap >= 3 for gap in gaps) >= 6  # "...: 1 of 30 frames show success"


@pytest.mark.parametrize("key", ["cam", "grey"])
def test_a_row_goes_from_the_first_frame_to_the_last_and_has_the_success(folder, tmp_path, key):
    sheet = Image.open(contact_sheet([open_folder(folder)], tmp_path / "new" / "sheet.png", [key], columns=4, rows=9))
    assert sheet.size == (4 * CELL, 2 * (CELL + CAPTION))
    assert [cell(sheet, 0, column) for column in range(4)] == [
        (NOT_DONE, 0),
        (NOT_DONE, 10),
        (DONE, 20),
        (NOT_DONE, 29),
    ]
    assert [cell(sheet, 1, column)[1] for column in range(4)] == [0, 10, 19, 29]


def test_several_cameras_have_a_line_each(folder, tmp_path):
    words = ["frames", "show", str(folder), "--output", str(tmp_path / "sheet.png"), "--columns", "4", "--rows", "1"]
    cli.app(words, result_action="return_value", exit_on_error=False)
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (4 * CELL, 2 * (CELL + CAPTION))
    assert cell(sheet, 0, 2) == cell(sheet, 1, 2) == (DONE, 20)
    cli.app([*words, "--image-key", "grey"], result_action="return_value", exit_on_error=False)
    assert Image.open(tmp_path / "sheet.png").size == (4 * CELL, CELL + CAPTION)


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


def test_what_cannot_be_shown_is_named(folder, tmp_path):
    files = [open_folder(folder)]
    with pytest.raises(DataError, match="has no images 'top': it has cam, grey"):
        contact_sheet(files, tmp_path / "sheet.png", ["top"])
    with pytest.raises(ConfigError, match="0 trajectories by 12 frames of 1 cameras cannot be drawn"):
        contact_sheet(files, tmp_path / "sheet.png", ["cam"], rows=0)
    with pytest.raises(ConfigError, match=r"cannot be written \(File exists\)"):
        contact_sheet(files, next(folder.iterdir()) / "sheet.png", ["cam"])
    with pytest.raises(ConfigError, match=r"the sheet is a PNG, and .* write sheet.png"):
        contact_sheet(files, tmp_path / "sheet.txt", ["cam"])
    with pytest.raises(ConfigError, match="nothing to show"):
        cli.app(["frames", "show"], result_action="return_value", exit_on_error=False)
