"""The files that describe a checkpoint: `COMPLETE.json`, the manifest of its files, and `reward_model.json`.

`COMPLETE.json` lists every file with its size and SHA-256 and is written last: a checkpoint counts only once it is
there, and only while every byte is unchanged. `reward_model.json` holds what scoring needs beside the weights, and
where the checkpoint came from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypedDict

from huggingface_hub import constants, list_repo_files, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the HTTP package that this version of the hub's client is written for, and its own
    RepositoryNotFoundError,
)
from transformers import ProcessorMixin

from vlmrm.data.arguments import INPUT_KEYS
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import content_digest, content_digests, fsync, write_json
from vlmrm.libraries import hub_answers, installed_version
from vlmrm.outputs import ONE, Outputs
from vlmrm.settings import nearest_file

logger = logging.getLogger("vlmrm")

COMPLETE = "COMPLETE.json"
ADAPTER_CONFIG = "adapter_config.json"
REWARD_FILE = "reward_model.json"
SCHEMA_VERSION = 1  # of reward_model.json
# Folders of the trained model in output_dir: that of the last step, or with load_best_model_at_end the best one.
FINAL, BEST = "final", "best"
TRAINING_LOCK = ".training.lock"  # marks an output_dir, which the first process locks while it trains
# Files that scores depend on: weights, head, configuration, processor and chat template; others are of the training.
WEIGHTS = ".safetensors"
SCORING_SUFFIXES = (WEIGHTS, ".json", ".jinja", ".txt", ".model")
NOT_SCORING = (COMPLETE, "trainer_state.json", "training_settings.json")
# Keys of `reward_model.json` that change no score: mean and deviation of `reward_count` raw scores on the data with
# the fingerprint `reward_data`, the same of each output by name, samples with their scores, and where it came from.
SCALE = ("reward_mean", "reward_std", "reward_count", "reward_data", "reward_quantiles", "reward_temperature")
FIGURES = (*SCALE, "pinned")
SCALES = "reward_scales"
NOT_SCORING_KEYS = ("provenance", SCALES, *FIGURES)
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")  # beginnings of files of no weights
NOT_NESTED = re.compile(r"(checkpoint-[^/]*/)?[^/]+")
# Weights of other trainers' heads (v_head.summary.bias, rm_head.0.weight, classifier.weight), and biases of `score`.
HEAD_WEIGHTS = re.compile(r"(^|\.)((?!lm_head)\w+_heads?|score\w*|classifier|regression\w*)\.")
LIBRARIES = ("vlmrm", "torch", "transformers", "trl", "peft", "accelerate", "deepspeed")


class Manifest(TypedDict):
    """The content of `COMPLETE.json`: of each file, by its relative path, `bytes` and `sha256`."""

    world_size: int
    step: int | None
    files: dict[str, dict[str, Any]]


def write_complete(folder: str | Path, world_size: int, step: int | None) -> None:
    """Write `COMPLETE.json`: every file in `folder` with its size and SHA-256, once all are on the disk.

    One process calls it, after all have written. `step` is None for a checkpoint made outside training.
    """
    folder = Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / COMPLETE]
    for path in files:  # or a power cut could leave a manifest of files that never reached the disk
        fsync(path)
    listed: dict[str, dict[str, Any]] = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in content_digests(files).items()
    }
    write_json(folder / COMPLETE, Manifest(world_size=world_size, step=step, files=listed))


def verify_complete(folder: str | Path, every_byte: bool = True, hashed: bool = True) -> Manifest:
    """Verify every file that `COMPLETE.json` lists, and return its content.

    Without `every_byte` only the size is checked of files that no score depends on, such as the optimizer's; without
    `hashed` only the size of all files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}: check the path.")
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        listed = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {COMPLETE}: saving it was interrupted, so use an older one.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({error}): use another checkpoint.") from error
    remedy = "so copy it again or use another checkpoint."
    # Sizes of all files first: a truncated one is refused before gigabytes are hashed.
    for name, (size, _) in listed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is broken: {name} is missing, {remedy}")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is broken: {name} has {path.stat().st_size} bytes instead of {size}, {remedy}"
            )
    to_hash = [folder / name for name in listed if hashed and (every_byte or Path(name).suffix in SCORING_SUFFIXES)]
    for path, digest in _digests(to_hash).items():
        name = path.relative_to(folder).as_posix()
        if digest != listed[name][1]:
            raise CheckpointError(f"{folder} is broken: bytes of {name} were changed since it was saved, {remedy}")
    return manifest


def verify_if_listed(folder: str | Path, check_files: bool = True) -> Manifest | None:
    """Verify the files that opening a model reads; None for a folder without `COMPLETE.json`, such as a download.

    Without `check_files` only sizes are checked, and the log says so.
    """
    if not (Path(folder) / COMPLETE).exists():
        return None
    if not check_files:
        logger.warning("check_files: false: nothing checks that the bytes of %s are those that were saved", folder)
    return verify_complete(folder, every_byte=False, hashed=check_files)


def checkpoint_digest(folder: str | Path, check_files: bool = True, weights: bool = True) -> str:
    """Return a hex digest of all that a checkpoint's scores depend on: weights, head, configuration, processor.

    Checkpoints of equal content have equal digests, whatever their folder and training. Without `check_files` the
    digests in `COMPLETE.json` are trusted; files that it does not list are read. Without `weights` the digest is of
    the other files, and so the same for all checkpoints of a training.
    """
    folder = Path(folder)
    files = sorted(path for path in folder.glob("*") if path.suffix in SCORING_SUFFIXES and path.is_file())
    if not any(path.suffix == WEIGHTS for path in files):
        raise CheckpointError(f"{folder} holds no safetensors file: check the path.")
    scoring = [path for path in files if path.name not in NOT_SCORING and (weights or path.suffix != WEIGHTS)]
    trusts = not check_files and (folder / COMPLETE).exists()
    listed = verify_complete(folder, hashed=False)["files"] if trusts else {}
    hashed = _digests(path for path in scoring if path.name not in listed)
    digest = hashlib.sha256()
    for path in scoring:
        content = hashed.get(path) or listed[path.name]["sha256"]
        digest.update(f"{path.name}\0{_scoring_keys(path) or content}\0".encode())
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """Return a hex digest of a checkpoint's weights alone, by which an adapter knows its base."""
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors: check the path.")
    names = (f"{path.name}\0{content}\0" for path, content in _digests(files).items())
    return hashlib.sha256("".join(names).encode()).hexdigest()


def _digests(paths: Iterable[Path]) -> dict[Path, str]:
    try:
        return content_digests(paths)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{error.filename} cannot be read ({reason}): copy the checkpoint again or use another."
        ) from error


def _scoring_keys(path: Path) -> str | None:
    """Return those keys of `reward_model.json` that change a score; None for every other file."""
    if path.name != REWARD_FILE:
        return None
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # opening the checkpoint reports it
    return json.dumps({key: value for key, value in info.items() if key not in NOT_SCORING_KEYS}, sort_keys=True)


def find_checkpoints(output_dir: str | Path, pattern: str = "checkpoint-*") -> list[Path]:
    """Return the folders of `output_dir` that match `pattern` in natural order: checkpoint-9 before checkpoint-10."""

    def natural(path: Path) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", path.relative_to(output_dir).as_posix())
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    return sorted((path for path in Path(output_dir).glob(pattern) if path.is_dir()), key=natural)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; if the process is killed meanwhile, its folder is as it was or gone."""
    doomed = folder.with_name(f".{folder.name}.deleted")
    try:
        if doomed.exists():
            shutil.rmtree(doomed)  # left by a killed process
        os.rename(folder, doomed)
        (doomed / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be deleted ({error}): delete it by hand.") from error


def is_finished(output_dir: str | Path) -> bool:
    """Return whether the training in `output_dir` has ended and its model is complete."""
    return any(Path(output_dir, name, COMPLETE).is_file() for name in (FINAL, BEST))


def save_reward_files(
    folder: str | Path,
    *,
    processor: ProcessorMixin,
    head: str | dict[str, Any],
    provenance: dict[str, Any],
    shown: Mapping[str, Any] | None = None,
    base_digest: str | None = None,
    outputs: Outputs = ONE,
    **figures: Any,
) -> None:
    """Write the processor and `reward_model.json` beside weights that are already in `folder`.

    `head` is `config.reward_head` of the model, `shown` the `DataArguments.input_record` of the training,
    `base_digest` the `weights_digest` of the base that an adapter was trained on, `outputs` what the model answers;
    `figures` are some of `FIGURES`.
    """
    folder = Path(folder)
    processor.save_pretrained(folder)
    architectures = (read_json_of(folder, "config.json") or {}).get("architectures")  # an adapter has no configuration
    write_json(
        folder / REWARD_FILE,
        {
            "schema_version": SCHEMA_VERSION,
            "head": head,
            **({} if outputs == ONE else {"outputs": outputs.described()}),
            "architecture": next(iter(architectures or []), None),
            "chat_template_sha256": template_hash(processor),
            **{name: (shown or {}).get(name) for name in INPUT_KEYS},
            **dict.fromkeys(FIGURES),
            **figures,
            "base_digest": base_digest,
            "provenance": provenance,
        },
    )


def save_scale(folder: str | Path, scale: Mapping[str, Any]) -> bool:
    """Write how a checkpoint's raw scores are distributed on reference data, `SCALE`, into `reward_model.json`.

    Returns False, and writes nothing, where the file is missing or has these values already. The checkpoint is
    complete at any moment: first `COMPLETE.json` drops the file, then the file is replaced, then it is listed again.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}: it was moved or deleted.")
    info = read_reward_file(folder)
    manifest = verify_if_listed(folder)
    if info is None or (scale.items() <= info.items() and (manifest is None or REWARD_FILE in manifest["files"])):
        return False
    path = folder / REWARD_FILE
    if manifest is None:
        write_json(path, info | dict(scale))
        return True
    files = {name: entry for name, entry in manifest["files"].items() if name != REWARD_FILE}
    write_json(folder / COMPLETE, manifest | {"files": files})
    write_json(path, info | dict(scale))
    entry = {"bytes": path.stat().st_size, "sha256": content_digest(path)}
    write_json(folder / COMPLETE, manifest | {"files": files | {REWARD_FILE: entry}})
    return True


def scale_in(folder: str | Path) -> dict[str, Any]:
    """Return what a checkpoint carries of its scores on reference data; nothing where that was not measured."""
    info = read_reward_file(folder) or {}
    return {name: info[name] for name in (*SCALE, SCALES) if info.get(name) is not None}


def provenance(source: dict[str, Any]) -> dict[str, Any]:
    """Return `source` (base model, revision, data fingerprint, seed) with the current versions and git commit."""
    versions = {library: version for library in LIBRARIES if (version := installed_version(library))}
    return {**source, "versions": versions, "git_commit": _git_commit()}


def read_reward_file(path: str | Path) -> dict[str, Any] | None:
    """Return the content of `reward_model.json` of a folder or hub checkpoint; None where there is none."""
    info = read_json_of(path, REWARD_FILE)
    if info is not None and info.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{REWARD_FILE} of {path} has schema version {info.get('schema_version')}, this is version "
            f"{SCHEMA_VERSION}: use the vlmrm that wrote it."
        )
    return info


def read_json_of(path: str | Path, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the content of a JSON file of a folder or hub checkpoint; None where there is none."""
    file = find_file(path, name, revision)
    if file is None:
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name} of {path} is not JSON ({error}): copy the checkpoint again.") from error


def is_adapter(path: str | Path, revision: str | None = None) -> bool:
    """Return whether a folder or hub checkpoint is an adapter."""
    return find_file(path, ADAPTER_CONFIG, revision) is not None


def find_file(path: str | Path, name: str, revision: str | None = None) -> Path | None:
    """Return the local path of a file of a folder or hub checkpoint; None where there is none."""
    file = (Path(path) if Path(path).is_dir() else hub_snapshot(path, revision, allow_patterns=[name])) / name
    return file if file.is_file() else None


def file_names(path: str | Path, revision: str | None = None) -> list[str]:
    """Return the paths of all files of a folder or hub checkpoint inside it; without a network, of the cached ones."""
    if not Path(path).is_dir() and hub_answers():
        try:
            return sorted(list_repo_files(str(path), revision=revision))
        except (HTTPError, HFValidationError, OSError) as error:
            raise _unreachable(path, error) from error
    folder = Path(path) if Path(path).is_dir() else hub_snapshot(path, revision)
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def weight_names(path: str | Path, revision: str | None = None) -> list[str]:
    """Return the names of a folder's or repository's `weight_files`, or of those that could be; empty without any."""
    for name in INDICES:
        if index := read_json_of(path, name, revision):
            shards = sorted(set(index.get("weight_map", {}).values()))
            if outside := [shard for shard in shards if shard.startswith("/") or ".." in PurePath(shard).parts]:
                raise CheckpointError(f"{name} of {path} names {outside[0]}, which is outside: copy it again.")
            return shards
    heads = head_files(path, revision)
    names = [name for name in file_names(path, revision) if NOT_NESTED.fullmatch(name) and name not in heads]
    files = [file for file in map(PurePath, names) if file.name not in ADAPTERS]
    files = [file for file in files if file.suffix in SUFFIXES and not file.stem.startswith(OF_TRAINING)]
    first = min((SUFFIXES.index(file.suffix) for file in files), default=0)
    return [str(file) for file in files if file.suffix == SUFFIXES[first]]


def head_files(path: str | Path, revision: str | None = None) -> list[str]:
    """Return the names of a folder's or repository's files with a trained head alone, safetensors before torch's."""
    files = [PurePath(name) for name in file_names(path, revision) if "/" not in name]
    heads = [f for f in files if f.suffix in SUFFIXES and f.stem.endswith("head") and f.stem != "lm_head"]
    return [file.name for file in sorted(heads, key=lambda file: (SUFFIXES.index(file.suffix), file.name))]


def hub_snapshot(path: str | Path, revision: str | None = None, **patterns: Any) -> Path:
    """Return the folder of a hub checkpoint, fetched as `patterns` say; without a network, of what was fetched."""
    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=not hub_answers(), **patterns))
    except (HTTPError, HFValidationError, OSError) as error:
        raise _unreachable(path, error) from error


def local_folder(path: str | Path, revision: str | None = None) -> Path:
    """Return the folder on this machine that holds a folder or hub checkpoint."""
    if Path(path).is_dir():
        return Path(path)
    for name in ("config.json", ADAPTER_CONFIG):
        if (file := find_file(path, name, revision)) is not None:
            return file.parent
    raise CheckpointError(f"{path} has neither a config.json nor an {ADAPTER_CONFIG}: check the path.")


def _unreachable(path: str | Path, cause: Exception) -> CheckpointError | ConfigError:
    if Path(path).is_file():
        return ConfigError(f"{path} is a file: give the folder of a checkpoint.")
    if isinstance(cause, GatedRepoError):
        return CheckpointError(
            f"{path} is gated: ask for access at {constants.ENDPOINT}/{path}, and log in with `hf auth login`."
        )
    otherwise = ": check the path and the network."
    if isinstance(cause, RepositoryNotFoundError):
        otherwise = ": check the name, and if it is a private one, log in with `hf auth login`."
    return CheckpointError(
        f"{path} is neither a folder nor a hub checkpoint that can be reached{nearest_file(Path(path), otherwise)}"
    )


def template_hash(processor: ProcessorMixin) -> str:
    """Return the SHA-256 of the processor's chat template, in hexadecimal."""
    template = processor.chat_template
    if not template:
        raise CheckpointError(
            f"{type(processor).__name__} has no chat template: start from an instruction-tuned checkpoint."
        )
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()


@cache
def _git_commit() -> str | None:
    """Return the commit of this source tree when it was first asked for; None where vlmrm is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # no git here, or the tree belongs to another user
    return result.stdout.strip()
