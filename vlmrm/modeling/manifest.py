"""`COMPLETE.json`: a checkpoint's files, each with its size and SHA-256, written last.

A checkpoint counts only once it is there, and only while every byte is what it was then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmrm.errors import CheckpointError
from vlmrm.files import content_digest, content_digests, fsync, write_json

logger = logging.getLogger("vlmrm")

COMPLETE = "COMPLETE.json"
# Where in output_dir the trained model is: as the last step left it, or the best checkpoint if that was asked for.
FINAL, BEST = "final", "best"
# What a score depends on: weights, head, configuration, processor and chat template. The rest is of the training.
SCORING_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
NOT_SCORING = (COMPLETE, "trainer_state.json", "training_settings.json")
# What `reward_model.json` tells of the checkpoint's past or of other data changes no score.
NOT_SCORING_KEYS = ("provenance", "pinned", "reward_mean", "reward_std", "reward_count", "reward_data")


def write_complete(folder: str | Path, world_size: int, step: int | None) -> None:
    """Write `COMPLETE.json`: every file in `folder` with its size and SHA-256, once all are on the disk.

    One process calls it, after all have written. `step` is None for a checkpoint made outside training.
    """
    folder = Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / COMPLETE]
    for path in files:
        fsync(path)
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in content_digests(files).items()
    }
    write_json(folder / COMPLETE, {"world_size": world_size, "step": step, "files": listed})


def entry(path: Path) -> dict[str, Any]:
    """Return what `COMPLETE.json` lists of a file."""
    return {"bytes": path.stat().st_size, "sha256": content_digest(path)}


def verify_complete(folder: str | Path, every_byte: bool = True, hashed: bool = True) -> dict[str, Any]:
    """Check every file that `COMPLETE.json` lists, and return what it holds.

    Without `every_byte`, of files that no score depends on, such as the optimizer's, only the size is checked; and
    of all files, unless they are `hashed`.

    Raises:
        CheckpointError: when it is not there or not readable, or a file is missing or has other content.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}: check the path.")
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        if any(isinstance(file, int) for file in manifest["files"].values()):
            raise CheckpointError(
                f"{folder / COMPLETE} was written by an earlier version, without digests: use another checkpoint, or "
                "remove it to open the model unverified."
            )
        listed = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {COMPLETE}: saving it was interrupted, so use an older one.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({error}): use another checkpoint.") from error
    again = "so copy it again or use another checkpoint."
    for name, (size, _) in listed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is broken: {name} is missing, {again}")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is broken: {name} has {path.stat().st_size} bytes instead of {size}, {again}"
            )
    read = [folder / name for name in listed if hashed and (every_byte or Path(name).suffix in SCORING_SUFFIXES)]
    for path, digest in _digests(read).items():
        name = path.relative_to(folder).as_posix()
        if digest != listed[name][1]:
            raise CheckpointError(f"{folder} is broken: bytes of {name} were changed since it was saved, {again}")
    return manifest


def checkpoint_digest(folder: str | Path, check_files: bool = True) -> str:
    """Return a hex digest of what a checkpoint's scores depend on: weights, head, configuration, processor, template.

    Two checkpoints of equal content have the same one, wherever they lie and whatever trained them. Without
    `check_files` what `COMPLETE.json` says of a file's content is taken on trust; other files are read.

    Raises:
        CheckpointError: when there is no such folder, or it holds no weights.
    """
    folder = Path(folder)
    files = sorted(path for path in folder.glob("*") if path.suffix in SCORING_SUFFIXES and path.is_file())
    if not any(path.suffix == ".safetensors" for path in files):
        raise CheckpointError(f"{folder} holds no safetensors file: check the path.")
    scoring = [path for path in files if path.name not in NOT_SCORING]
    trusts = not check_files and (folder / COMPLETE).exists()
    listed = verify_complete(folder, hashed=False)["files"] if trusts else {}
    read = _digests(path for path in scoring if path.name not in listed)
    digest = hashlib.sha256()
    for path in scoring:
        content = read.get(path) or listed[path.name]["sha256"]
        digest.update(f"{path.name}\0{_scoring_part(path) or content}\0".encode())
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """Return a hex digest of a checkpoint's weights alone: what an adapter knows its base by, downloaded or copied.

    Raises:
        CheckpointError: when there is no such folder, or it holds no weights.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors: check the path.")
    names = (f"{path.name}\0{content}\0" for path, content in _digests(files).items())
    return hashlib.sha256("".join(names).encode()).hexdigest()


def _digests(paths: Iterable[Path]) -> dict[Path, str]:
    """`content_digests` of a checkpoint's files.

    Raises:
        CheckpointError: when one cannot be read.
    """
    try:
        return content_digests(paths)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{error.filename} cannot be read ({reason}): copy the checkpoint again or use another."
        ) from error


def _scoring_part(path: Path) -> str | None:
    """Return those keys of `reward_model.json` that change a score; None for every other file."""
    if path.name != "reward_model.json":
        return None
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # whoever opens the checkpoint says so
    return json.dumps({key: value for key, value in info.items() if key not in NOT_SCORING_KEYS}, sort_keys=True)


def verify_if_listed(folder: str | Path, check_files: bool = True) -> dict[str, Any] | None:
    """`verify_complete` of what opening a model reads; None for a folder without a `COMPLETE.json`: a downloaded one.

    Without `check_files` only sizes are checked, and a line says so.

    Raises:
        CheckpointError: as `verify_complete` does.
    """
    if not (Path(folder) / COMPLETE).exists():
        return None
    if not check_files:
        logger.warning("check_files: false: nothing checks that the bytes of %s are those that were saved", folder)
    return verify_complete(folder, every_byte=False, hashed=check_files)


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


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
