"""`COMPLETE.json`: the list of a checkpoint's files, written last. A checkpoint counts only once it is there."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from vlmrm.errors import CheckpointError

logger = logging.getLogger("vlmrm")

COMPLETE = "COMPLETE.json"
# Where in output_dir the trained model is: as the last step left it, or the best checkpoint if that was asked for.
FINAL, BEST = "final", "best"


def write_complete(folder: str | Path, world_size: int, step: int | None) -> None:
    """Writes `COMPLETE.json`: every file in `folder` with its size in bytes, once all are on the disk.

    One process calls it, after all have written. `step` is None for a checkpoint made outside training.
    """
    folder = Path(folder)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / COMPLETE:
            _fsync(path)
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / COMPLETE, {"world_size": world_size, "step": step, "files": files})


def verify_complete(folder: str | Path) -> dict[str, Any]:
    """Checks every file that `COMPLETE.json` lists, and returns what it holds.

    Raises:
        CheckpointError: when it is not there or not readable, or a file is missing or has another size.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}: check the path.")
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {COMPLETE}: saving it was interrupted, so use an older one.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({error}): use another checkpoint.") from error
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is broken: {name} is missing, so copy it again or use another checkpoint."
            )
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is broken: {name} has {path.stat().st_size} bytes instead of {size}, so copy it again or "
                "use another checkpoint."
            )
    return manifest


def verify_if_listed(folder: str | Path) -> dict[str, Any] | None:
    """`verify_complete` of a folder with a `COMPLETE.json`; None for one without, such as a downloaded checkpoint.

    Raises:
        CheckpointError: as `verify_complete` does.
    """
    return verify_complete(folder) if (Path(folder) / COMPLETE).exists() else None


def find_checkpoints(output_dir: str | Path, pattern: str = "checkpoint-*") -> list[Path]:
    """The folders of `output_dir` that match `pattern`, in natural order: checkpoint-9 before checkpoint-10."""
    folders = [path for path in Path(output_dir).glob(pattern) if path.is_dir()]
    return sorted(folders, key=lambda path: _natural(path.relative_to(output_dir).as_posix()))


def is_finished(output_dir: str | Path) -> bool:
    """Whether the training in `output_dir` has ended: what it trained is there, and whole."""
    return any(Path(output_dir, name, COMPLETE).is_file() for name in (FINAL, BEST))


def newest_complete(output_dir: str | Path) -> Path | None:
    """The checkpoint of `output_dir` with the most steps that verifies; names each broken one that it passes over."""
    for folder in reversed(find_checkpoints(output_dir)):
        try:
            verify_complete(folder)
        except CheckpointError as error:
            logger.warning("passing over %s: %s", folder.name, error)
        else:
            return folder
    return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is at any moment either absent, the old one, or whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
