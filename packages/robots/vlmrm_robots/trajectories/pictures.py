"""`vlmrm frames show`: trajectories as one sheet of frames, or as a picture for each frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from vlmrm.errors import ConfigError
from vlmrm.files import atomic_write, make_folder
from vlmrm_robots.trajectories.trajectory import TrajectoryFile

SIDE, BORDER, CAPTION = 96, 3, 12  # pixels of a frame, of its border, and of the text above
PITCH = SIDE + 2 * BORDER
DONE, NOT_DONE = (22, 140, 60), (200, 200, 200)
MAX_CELLS = 2000


def contact_sheet(
    folders: Sequence[Sequence[TrajectoryFile]],
    output: Path,
    keys: Sequence[str],
    *,
    columns: int = 12,
    rows: int = 12,
) -> Path:
    """Draw `rows` trajectories of each folder, evenly spread: a line of `columns` frames for each of the cameras.

    Lines go from first to last. Successes have green borders, and of an episode with successes one at least is shown.
    """
    if output.suffix.lower() != ".png":
        raise ConfigError(f"the sheet is a PNG, and {output} has another name: write {output.stem}.png.")
    if columns < 1 or rows < 1 or columns * rows * len(keys) > MAX_CELLS:
        cells = f"{rows} trajectories by {columns} frames of {len(keys)} cameras"
        raise ConfigError(f"a sheet of {cells} cannot be drawn: it has 1 to {MAX_CELLS} cells.")
    lines = []
    for file, key in product((files[i] for files in folders for i in _spread(len(files), rows)), keys):
        name = f"{file.path.parent.name}/{file.path.stem}" + (f", {key}" if len(keys) > 1 else "")
        shown = [(file, t) for t in _spread_with_success(file.successes, columns)]
        lines.append((f"{name}: {file.successes.sum()} of {len(file)} frames show success", key, shown))
    return draw_lines(lines, output, columns)


def draw_lines(
    lines: Sequence[tuple[str, str, Sequence[tuple[TrajectoryFile, int]]]], output: Path, columns: int
) -> Path:
    """Draw lines of frames, each with a text above, a camera, and the frames as a file and a step."""
    sheet = Image.new("RGB", (columns * PITCH, len(lines) * (PITCH + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (caption, key, shown) in enumerate(lines):
        top = row * (PITCH + CAPTION)
        # A space of Pillow's font is as narrow as the gap between two letters.
        draw.text((BORDER, top), caption.replace(" ", "  "), fill="black")
        for column, (file, t) in enumerate(shown):
            colour = DONE if file.successes[t] else NOT_DONE
            picture = ImageOps.pad(as_picture(file.frame(key, t)), (SIDE, SIDE), color=colour)
            sheet.paste(ImageOps.expand(picture, BORDER, colour), (column * PITCH, top + CAPTION))
    return save_picture(sheet, output)


def _spread_with_success(successes: np.ndarray, count: int) -> list[int]:
    """Return at most `count` frames, evenly spread; if they lack a success, the nearest moves to the first one."""
    steps = _spread(len(successes), count)
    if successes.any() and not successes[steps].any():
        first = int(successes.argmax())
        nearest = min(range(len(steps)), key=lambda i: abs(steps[i] - first))
        steps[nearest] = first
    return steps


def _spread(total: int, count: int) -> list[int]:
    """Return at most `count` of `total` indices, evenly spread, with the first and the last."""
    return sorted({round(index) for index in np.linspace(0, total - 1, min(count, total))})


def write_frames(
    files: Iterable[TrajectoryFile], keys: Sequence[str], folder: Path, *, successes_only: bool = False
) -> list[Path]:
    """Write frames as `{folder}_{trajectory}_frame{index:03d}.png`, with several cameras also `_{key}`."""
    return [
        save_picture(as_picture(file.frame(key, t)), folder / _name(file, t, key if len(keys) > 1 else None))
        for file in files
        for t in (map(int, np.flatnonzero(file.successes)) if successes_only else range(len(file)))
        for key in keys
    ]


def _name(file: TrajectoryFile, t: int, key: str | None) -> str:
    return f"{file.path.parent.name}_{file.path.stem}_frame{t:03d}{f'_{key}' if key else ''}.png"


def as_picture(frame: np.ndarray) -> Image.Image:
    """Return a frame uint8 [C,H,W], grey or RGB, as an RGB picture."""
    return Image.fromarray(np.broadcast_to(frame, (3, *frame.shape[1:])).transpose(1, 2, 0).copy())


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Write a PNG, whatever the suffix; ConfigError if that is impossible."""
    make_folder(path.parent)
    with atomic_write(path) as temporary:
        picture.save(temporary, "PNG")
    return path
