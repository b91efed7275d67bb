"""Environments of other frameworks, one each: its release and pins, and of vlmrm the light core alone.

They are made by uv in `.cache/neighbours`, two at a time. Files come as hard links out of uv's cache, so that all
share one torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".cache" / "neighbours"
UV = Path(sys.executable).with_name("uv")
LIMIT_S = 1200  # against a uv that hangs
SOURCES = ROOT / "drives" / "resolving" / "uv.toml"  # what is published as sources alone


@dataclass(frozen=True)
class Neighbour:
    """A framework to drive: its key in neighbours.toml, and what is written there."""

    name: str
    title: str
    requires: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    interpreter: str = sys.executable
    copy: str | None = None
    sources: tuple[str, ...] = (".",)
    robots: bool = False  # whether it has vlmrm-robots too

    @property
    def checkout(self) -> Path | None:
        """The copy of a framework that no registry has, below NEIGHBOUR_PATH."""
        return None if self.copy is None else Path(os.environ.get("NEIGHBOUR_PATH", "neighbours"), self.copy).resolve()

    @property
    def is_here(self) -> bool:
        """False for one of which there is no copy."""
        return self.checkout is None or self.checkout.is_dir()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def driver(self) -> Path:
        return HERE / f"drive_{self.name}.py"

    @property
    def ours(self) -> list[Path]:
        """The folders of our distributions that it has."""
        return [ROOT, ROOT / "packages/robots"] if self.robots else [ROOT]

    @property
    def stamp(self) -> str:
        """What an environment was made of; another one is made anew."""
        projects = [(folder / "pyproject.toml").read_text(encoding="utf-8") for folder in self.ours]
        asked = repr((self.requires, self.excludes, self.interpreter, *projects))
        return hashlib.sha256(asked.encode()).hexdigest()


def neighbours() -> list[Neighbour]:
    """Return the frameworks of neighbours.toml."""
    listed = tomllib.loads((HERE / "neighbours.toml").read_text(encoding="utf-8"))
    return [Neighbour(name, **{key: _frozen(value) for key, value in one.items()}) for name, one in listed.items()]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def make(neighbour: Neighbour) -> str | None:
    """Make the environment unless it is there; return why it cannot be made, in uv's words."""
    if not neighbour.is_here:
        return f"{neighbour.checkout} is no copy of it: check one out there, or set NEIGHBOUR_PATH"
    made = neighbour.folder / ".installed"
    if made.exists() and made.read_text(encoding="utf-8") == neighbour.stamp:
        return None
    began = time.monotonic()
    neighbour.folder.parent.mkdir(parents=True, exist_ok=True)
    without = FOLDER / f"{neighbour.name}.overrides"
    without.write_text("".join(f"{name}; python_version < '3'\n" for name in neighbour.excludes), encoding="utf-8")
    install = [UV, "pip", "install", "--quiet", "--system-certs", "--python", neighbour.python]
    install += ["--config-file", SOURCES, "--overrides", without, *neighbour.requires]
    install += [word for folder in neighbour.ours for word in ("--editable", folder)]
    for command in ([UV, "venv", "--quiet", "--clear", "--python", neighbour.interpreter, neighbour.folder], install):
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        try:
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"uv did not end in {LIMIT_S} s"
        if ran.returncode:
            return ran.stderr.strip()
    made.write_text(neighbour.stamp, encoding="utf-8")
    sys.stdout.write(f"{neighbour.title}: environment made in {time.monotonic() - began:.0f} s\n")
    sys.stdout.flush()
    return None


def make_all(asked: Sequence[Neighbour]) -> dict[str, str | None]:
    """Make the environments, two at a time; return by name what went wrong.

    The first is made alone: two that fetch torch at once would have two of it.
    """
    with ThreadPoolExecutor(2) as pool:
        reasons = [*map(make, asked[:1]), *pool.map(make, asked[1:])]
    return dict(zip((one.name for one in asked), reasons, strict=True))


def size(folder: Path = FOLDER) -> float:
    """Return the gigabytes of all environments; a file that several share counts once."""
    seen = {(it.st_dev, it.st_ino): it.st_blocks * 512 for it in map(os.lstat, map(str, folder.rglob("*")))}
    return sum(seen.values()) / 1e9
