"""What tells the scores of one worker from another's: the weights by their content, the settings, and its own word."""

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
FILES = re.compile(r"(_path|_file|^rubric)$")  # settings that name a file, a folder or a repository
DOWNLOADS = "download_path"  # where a reward puts files: what is there is not what it was told to read
OTHERWISE_EQUAL = ("device", "api_key", "endpoint_api_key")  # settings that change no score, or may be guessed


def revision_of(engine: str, options: Mapping[str, Any], weights: str, info: Mapping[str, Any]) -> str:
    """Return the revision of a reward as a worker has loaded it.

    Args:
        options: those that name a file or folder count by its content, and a repository of the Hugging Face hub by the
            commit that is in the cache.
        weights: a folder, file or repository like those; "" for a reward without, or whose worker says in `info` which
            they are.
        info: what the worker says of its reward.

    Raises:
        OSError: when the weights cannot be read.
    """
    settings = {name: value for name, value in options.items() if name not in OTHERWISE_EQUAL}
    named = {name: value for name, value in settings.items() if FILES.search(name) and isinstance(value, str)}
    files = {name: _content(value) for name, value in named.items() if name != DOWNLOADS}
    return digest_of(vlmrm.__version__, engine, settings, dict(info), _content(weights), files)


def digest_of(*parts: Any) -> str:
    """Return a short digest of a tree of JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def _content(weights: str) -> str:
    path = Path(weights)
    if not weights or not path.exists():
        return _commit(weights)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return digest_of({one.relative_to(path).as_posix(): digest for one, digest in content_digests(files).items()})


def _commit(repository: str) -> str:
    """Return the commit of a repository in Hugging Face's cache; "" where there is none."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        return (Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "refs/main").read_text().strip()
    except (ImportError, OSError):
        return ""
