"""The revision of a reward as a worker has loaded it: a digest of all that its scores depend on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vlmrm
from vlmrm.files import content_digests

DIGITS = 16
FILES = re.compile(r"(_path|_file|^rubric)$")  # options that name a file, a folder or a repository
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
DOWNLOADS = "download_path"  # a folder that a reward writes to: its content is not a setting
IRRELEVANT = ("device", "api_key", "endpoint_api_key")  # options that change no score, or could be guessed by a digest


def revision_of(engine: str, options: Mapping[str, Any], weights: str, info: Mapping[str, Any]) -> str:
    """Return the revision of a reward as a worker has loaded it: equal revisions give equal scores.

    Args:
        options: those that name a file or folder count by its content, and a repository of the Hugging Face hub by the
            commit that is in the cache.
        weights: such a folder, file or repository; "" for a reward without, or whose worker names them in `info`.
        info: what the worker says about its reward.
    """
    settings = {name: value for name, value in options.items() if name not in IRRELEVANT}
    paths = {name: value for name, value in settings.items() if FILES.search(name) and isinstance(value, str)}
    files = {name: _content(value) for name, value in paths.items() if name != DOWNLOADS}
    return digest(vlmrm.__version__, engine, settings, dict(info), _content(weights), files)


def weights_on_disk(options: Mapping[str, Any], weights: str) -> dict[Path, tuple[int, ...]]:
    """Return the files of weights that a reward may load, as they are: one that is written again is another."""
    named = [value for name, value in options.items() if FILES.search(name) or name == "model"]
    roots = [Path(value) for value in (weights, *named) if isinstance(value, str) and value]
    found = (file for root in roots for file in ([root] if root.is_file() else root.rglob("*")))
    states = {file: file.stat() for file in found if file.suffix in WEIGHTS and file.is_file()}
    return {file: (state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states.items()}


def digest(*parts: Any) -> str:
    """Return a short digest of a JSON tree."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def _content(weights: str) -> str:
    path = Path(weights)
    if not weights or not path.exists():
        return _commit(weights)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return digest({file.relative_to(path).as_posix(): value for file, value in content_digests(files).items()})


def _commit(repository: str) -> str:
    """Return the commit of a repository in Hugging Face's cache; "" where it is not cached."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        return (Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "refs/main").read_text().strip()
    except (ImportError, OSError):
        return ""
