"""`reward_model.json`: what scoring needs to know of a checkpoint beside its weights, and where it came from."""

from __future__ import annotations

import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import ProcessorMixin

from vlmrm.errors import CheckpointError
from vlmrm.files import write_json
from vlmrm.modeling.manifest import COMPLETE, entry, verify_if_listed

REWARD_FILE = "reward_model.json"
SCHEMA_VERSION = 1
LIBRARIES = ("vlmrm", "torch", "transformers", "trl", "peft", "accelerate", "deepspeed")


def save_reward_files(
    folder: str | Path,
    *,
    processor: ProcessorMixin,
    head: str,
    min_pixels: int | None,
    max_pixels: int | None,
    provenance: dict[str, Any],
    reward_mean: float | None = None,
    reward_std: float | None = None,
    reward_count: int | None = None,
    reward_data: str | None = None,
    pinned: list[dict[str, Any]] | None = None,
    base_digest: str | None = None,
) -> None:
    """Puts the processor and `reward_model.json` beside weights that are already in `folder`.

    `head` is `linear` or `mlp`; pixel limits are areas, None for the processor's own. `provenance` is what
    the function of that name returns. `reward_mean` and `reward_std` are of `reward_count` raw scores on the data with
    the fingerprint `reward_data`. `pinned` are samples with their scores, to check a copy against. `base_digest` is of
    the weights that an adapter was trained on: `weights_digest`.
    """
    folder = Path(folder)
    processor.save_pretrained(folder)
    write_json(
        folder / REWARD_FILE,
        {
            "schema_version": SCHEMA_VERSION,
            "head": head,
            "architecture": _architecture(folder),
            "chat_template_sha256": template_hash(processor),
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "reward_mean": reward_mean,
            "reward_std": reward_std,
            "reward_count": reward_count,
            "reward_data": reward_data,
            "pinned": pinned,
            "base_digest": base_digest,
            "provenance": provenance,
        },
    )


def save_normalization(folder: str | Path, *, mean: float, std: float, count: int, data: str) -> bool:
    """Puts mean and standard deviation of `count` raw scores on `data`, a fingerprint, into `reward_model.json`.

    The checkpoint is whole at any moment: first `COMPLETE.json` no longer lists the file, then the file is replaced,
    then it is listed again. Nothing is written where the file says so already, or is not there: False.

    Raises:
        CheckpointError: when a file of the checkpoint cannot be read.
        ConfigError: when one cannot be written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}: it was moved or deleted.")
    info = read_reward_file(folder)
    found = {"reward_mean": mean, "reward_std": std, "reward_count": count, "reward_data": data}
    manifest = verify_if_listed(folder)
    if info is None or (found.items() <= info.items() and (manifest is None or REWARD_FILE in manifest["files"])):
        return False
    if manifest is None:
        write_json(folder / REWARD_FILE, info | found)
        return True
    files = {name: size for name, size in manifest["files"].items() if name != REWARD_FILE}
    write_json(folder / COMPLETE, manifest | {"files": files})
    write_json(folder / REWARD_FILE, info | found)
    write_json(folder / COMPLETE, manifest | {"files": files | {REWARD_FILE: entry(folder / REWARD_FILE)}})
    return True


def provenance(source: dict[str, Any]) -> dict[str, Any]:
    """`source` (base model, revision, data fingerprint, seed) with the library versions and git commit of now."""
    return {**source, "versions": _versions(), "git_commit": _git_commit()}


def read_reward_file(path: str | Path) -> dict[str, Any] | None:
    """What `reward_model.json` of a folder or hub checkpoint holds; None where there is none.

    Raises:
        CheckpointError: when it cannot be read or is of a newer schema.
    """
    info = read_json_of(path, REWARD_FILE)
    if info is not None and info.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{REWARD_FILE} of {path} has schema version {info.get('schema_version')}, this is version "
            f"{SCHEMA_VERSION}: use the vlmrm that wrote it."
        )
    return info


def read_json_of(path: str | Path, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """A JSON file of a folder or hub checkpoint; None where there is none."""
    file = find_file(path, name, revision)
    if file is None:
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name} of {path} is not JSON ({error}): copy the checkpoint again.") from error


def find_file(path: str | Path, name: str, revision: str | None = None) -> Path | None:
    """A file of a folder or hub checkpoint, on this machine; None where there is none.

    Raises:
        CheckpointError: when there is no such checkpoint.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    try:
        return Path(hf_hub_download(str(path), name, revision=revision))
    except LocalEntryNotFoundError as error:  # the hub cannot be asked: what it said before counts
        return _find_kept(path, name, revision, error)
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _unreachable(path) from error


def local_folder(path: str | Path, revision: str | None = None) -> Path:
    """Return the folder on this machine that holds a folder or hub checkpoint.

    Raises:
        CheckpointError: when there is no such checkpoint.
    """
    if Path(path).is_dir():
        return Path(path)
    for name in ("config.json", "adapter_config.json"):
        if (file := find_file(path, name, revision)) is not None:
            return file.parent
    raise CheckpointError(f"{path} has neither a config.json nor an adapter_config.json: check the path.")


def _find_kept(path: str | Path, name: str, revision: str | None, error: Exception) -> Path | None:
    """A file of a hub checkpoint that was fetched before; None where what was fetched lacks it."""
    try:
        kept = snapshot_download(str(path), revision=revision, local_files_only=True, allow_patterns=[name])
    except OSError:
        raise _unreachable(path) from error
    file = Path(kept) / name
    return file if file.is_file() else None


def _unreachable(path: str | Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is neither a folder nor a hub checkpoint that can be reached: check the path and the network."
    )


def template_hash(processor: ProcessorMixin) -> str:
    """SHA-256 of the processor's chat template, in hexadecimal.

    Raises:
        CheckpointError: when it has none.
    """
    template = processor.chat_template
    if not template:
        raise CheckpointError(
            f"{type(processor).__name__} has no chat template: start from an instruction-tuned checkpoint."
        )
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()


def _architecture(folder: Path) -> str | None:
    """The class named in the folder's configuration; an adapter has none of its own."""
    config = read_json_of(folder, "config.json") or {}
    return next(iter(config.get("architectures") or []), None)


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue  # A machine that only serves has no trainer.
    return found


def _git_commit() -> str | None:
    """The commit of this source tree; None where vlmrm is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # No git here, or a tree of another user: the versions say what they can.
    return done.stdout.strip()
