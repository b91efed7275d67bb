"""Carry what vlmrm needs to a machine without a network, as wheels for its Python and platform.

On that machine:         python -m benchmarks.wheels describe > target.json
On one with a network:   python -m benchmarks.wheels pack target.json --output wheels
On that machine again:   python -m benchmarks.wheels install wheels --into build/gpu/site

`pack` downloads only what the machine lacks, in the versions of constraints.txt where these fit. It writes folders of
at most PIECE MiB, with large wheels cut, for a machine that takes no more at a time: `install --stage FOLDER` collects
them one call after another. `make gpu` installs what is in ./wheels, and imports from build/gpu/site.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.tags import sys_tags
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ModuleNotFoundError:  # pip has a copy
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
INDEX = "wheels.json"  # in every piece: the files, their digests, and what they were cut into
INSTALLED = ".wheels.json"  # the index of what a folder was installed from
EXTRAS = "train,serve"
PIECE_MIB = 60
MIB = 2**20


class Missing(Exception):
    """Something that cannot be packed or installed; the message is a sentence."""


# On the machine without a network -----------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Return this Python and platform, and the installed distributions with what they require."""
    found = {canonicalize_name(it.metadata["Name"]): it for it in metadata.distributions() if it.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "platforms": list(dict.fromkeys(tag.platform for tag in sys_tags() if tag.platform != "any")),
        "environment": dict(default_environment()),
        "installed": {name: it.version for name, it in sorted(found.items())},
        "requires": {name: it.requires for name, it in sorted(found.items()) if it.requires},
        "free_gib": round(shutil.disk_usage(ROOT).free / 2**30, 1),
    }


def install(folders: Sequence[Path], into: Path, stage: Path | None = None) -> str:
    """Install the wheels of these pieces into a folder for PYTHONPATH; return what was done, as a sentence.

    With `stage` the pieces are kept there, and installed once all of them have come.

    Raises:
        Missing: when a piece is missing and there is no `stage`, a file is damaged, or something else is in `into`.
    """
    installed = into / INSTALLED
    if not installed.is_file() and into.exists() and (into.is_file() or any(into.iterdir())):
        raise Missing(f"{into} is not empty, and not of wheels that were installed here: name another folder")
    if stage is not None:
        for path in _files(folders):
            stage.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, stage / path.name)
        folders = [stage]
    files = {path.name: path for path in _files(folders)}
    if INDEX not in files:
        raise Missing(f"{folders[0]} has no {INDEX}: name a folder that `pack` wrote")
    index = json.loads(files[INDEX].read_text(encoding="utf-8"))
    if wrong := [name for name in index if Path(name).name != name or not name.endswith(".whl")]:
        raise Missing(f"{wrong[0]} in {INDEX} is not the name of a wheel: copy its pieces again")
    lacking = [part for it in index.values() for part in it["parts"] if part not in files]
    if lacking:
        pieces = sorted({it["pieces"][part] for it in index.values() for part in it["parts"] if part in lacking})
        sentence = f"pieces {', '.join(map(str, pieces))} are not here yet"
        if stage is None:
            raise Missing(sentence)
        return sentence
    if installed.is_file() and json.loads(installed.read_text(encoding="utf-8")) == index:
        return f"{len(index)} wheels are in {into} already"
    with tempfile.TemporaryDirectory() as folder:
        wheels = [
            join(Path(folder, name), [files[part] for part in it["parts"]], it["sha256"]) for name, it in index.items()
        ]
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        installed.write_text("{}", encoding="utf-8")  # for the next call, should this one be stopped
        _pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(into), *map(str, wheels))
    installed.write_text(json.dumps(index), encoding="utf-8")
    return f"{len(index)} wheels are installed in {into}"


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def join(path: Path, parts: Sequence[Path], digest: str) -> Path:
    """Write a file from its parts, and return its path.

    Raises:
        Missing: when its digest is another.
    """
    made = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            content = part.read_bytes()
            made.update(content)
            file.write(content)
    if made.hexdigest() != digest:
        raise Missing(f"{path.name} is damaged: copy its pieces again")
    return path


# On the machine with one --------------------------------------------------------------------------------------------


@dataclass
class Packing:
    """The wheels that a machine lacks, from the requirements of one wheel down.

    `keep` are distributions that are left as they are there, whatever is required of them. `pip` downloads each into
    `folder`; the first version that is chosen stays, unless a later requirement refuses it.
    """

    target: Mapping[str, Any]
    folder: Path
    keep: frozenset[str] = frozenset()
    pins: Mapping[str, str] = field(default_factory=dict)
    packed: dict[str, Path] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    asked: dict[str, list[Requirement]] = field(default_factory=dict)

    def add(self, requirements: Iterable[str], extras: Iterable[str] = ()) -> None:
        """Download what these requirements, under these extras, lack there, and what that requires in turn."""
        queue = deque(self._active(requirements, extras))
        while queue:
            requirement = queue.popleft()
            name = canonicalize_name(requirement.name)
            before = self.asked.setdefault(name, [])
            if str(requirement) in map(str, before):
                continue
            before.append(requirement)
            queue.extend(self._active(self._meet(name, requirement), requirement.extras))

    def _active(self, requirements: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
        """Return those of the requirements that hold on the machine."""
        names = ["", *extras]
        made = [Requirement(text) for text in requirements]
        environments = [{**self.target["environment"], "extra": extra} for extra in names]
        return [it for it in made if it.marker is None or any(it.marker.evaluate(where) for where in environments)]

    def _meet(self, name: str, requirement: Requirement) -> list[str]:
        """Return what the distribution that meets a requirement requires, after downloading it where it is lacking."""
        there = self.target["installed"].get(name)
        if name in self.packed:
            version = str(parse_wheel_filename(self.packed[name].name)[1])
            if requirement.specifier.contains(version, prereleases=True):
                return required_by(self.packed[name])
        elif there is not None and (name in self.keep or requirement.specifier.contains(there, prereleases=True)):
            if not requirement.specifier.contains(there, prereleases=True):
                self.remarks.append(f"{name} {there} is kept, and {requirement} is required")
            return self.target["requires"].get(name) or []
        self._download(name)
        return required_by(self.packed[name])

    def _download(self, name: str) -> None:
        """Download the wheel that meets all that is required of a distribution so far."""
        specifiers = ",".join(filter(None, (str(it.specifier) for it in self.asked[name])))
        pin = self.pins.get(name)
        pinned = pin is not None and all(it.specifier.contains(pin, prereleases=True) for it in self.asked[name])
        choices = [f"{name}=={pin}"] * pinned + [f"{name}{specifiers}"]
        if (old := self.packed.pop(name, None)) is not None:
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            for choice in choices:
                try:
                    _pip("download", "--no-deps", "--only-binary=:all:", *self._platform(), "--dest", folder, choice)
                    break
                except Missing as error:
                    reason = error
            else:
                raise Missing(f"no wheel for that machine meets {choices[-1]}: {reason}")
            [wheel] = Path(folder).iterdir()
            self.packed[name] = Path(shutil.copy(wheel, self.folder))

    def _platform(self) -> list[str]:
        words = ["--python-version", ".".join(self.target["python"].split(".")[:2]), "--implementation", "cp"]
        return words + [word for tag in self.target["platforms"] for word in ("--platform", tag)]


def required_by(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, with their markers."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        return HeaderParser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []


def own_wheel(folder: Path) -> Path:
    """Build this project's wheel."""
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("vlmrm-*.whl"))


def pack(
    target: Mapping[str, Any],
    output: Path,
    *,
    extras: Sequence[str],
    also: Sequence[str] = (),
    keep: Sequence[str] = (),
    piece_mib: float = PIECE_MIB,
) -> list[str]:
    """Write the pieces that a machine lacks to have vlmrm with these extras; return lines that say what is in them.

    Args:
        also: further requirements, such as `bitsandbytes`.
        keep: distributions that stay as they are there.

    Raises:
        Missing: when there is no wheel of something, or `output` has something in it.
    """
    if output.exists() and any(output.iterdir()):
        raise Missing(f"{output} is not empty: name another folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = own_wheel(folder)
        kept = frozenset(map(canonicalize_name, keep))
        packing = Packing(target, folder, kept, _pins(ROOT / "constraints.txt"))
        packing.packed["vlmrm"] = own
        packing.add([*required_by(own), *also], extras)
        wheels = [*packing.packed.values()]
        pieces = cut(wheels, output, int(piece_mib * MIB))
        sizes = {wheel.name: wheel.stat().st_size / MIB for wheel in wheels}
    lines = [f"{size:8.1f} MiB  {name}" for name, size in sorted(sizes.items(), key=lambda it: -it[1])]
    return [*lines, *packing.remarks, f"{sum(sizes.values()):8.1f} MiB  in {pieces} pieces in {output}"]


def _pins(file: Path) -> dict[str, str]:
    """Return the versions of a file of constraints."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pins = (line.partition("==") for line in lines)
    return {canonicalize_name(name): version for name, _, version in pins if version}


def cut(wheels: Sequence[Path], output: Path, most: int) -> int:
    """Write folders 1, 2, ... of at most `most` bytes of wheels, or of parts of them, each with the index.

    Returns:
        The number of folders.
    """
    index: dict[str, dict[str, Any]] = {}
    rooms: list[int] = []
    for wheel in sorted(wheels, key=lambda path: -path.stat().st_size):  # the small ones fill what the large leave
        content = wheel.read_bytes()
        entry = index[wheel.name] = {"sha256": hashlib.sha256(content).hexdigest(), "parts": [], "pieces": {}}
        for at in range(0, len(content), most):
            part = content[at : at + most]
            name = wheel.name if len(content) <= most else f"{wheel.name}.{at // most + 1}"
            piece = next((n for n, room in enumerate(rooms) if room >= len(part)), len(rooms))
            rooms += [most] * (piece == len(rooms))
            rooms[piece] -= len(part)
            folder = output / str(piece + 1)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(part)
            entry["parts"].append(name)
            entry["pieces"][name] = piece + 1
    for folder in output.iterdir():
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return len(rooms)


def _pip(*words: str) -> None:
    """Run pip; its messages go to standard error.

    Raises:
        Missing: with its last line, when it fails.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Missing((lines or [done.stderr.strip() or "pip failed"])[-1].removeprefix("ERROR: "))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("describe", help="print this machine's Python, platform and distributions as JSON")
    packer = verbs.add_parser("pack", help="download what a described machine lacks")
    packer.add_argument("target", type=Path, help="what `describe` printed there")
    packer.add_argument("--output", type=Path, default=Path("wheels"))
    packer.add_argument("--extras", default=EXTRAS, help=f"of vlmrm, with commas; default: {EXTRAS}")
    packer.add_argument("--also", action="append", default=[], help="a further requirement; may be repeated")
    packer.add_argument("--keep", action="append", default=[], help="leave this as it is there; may be repeated")
    packer.add_argument("--piece", type=float, default=PIECE_MIB, help=f"MiB of a folder; default: {PIECE_MIB}")
    installer = verbs.add_parser("install", help="install pieces into a folder for PYTHONPATH")
    installer.add_argument("folders", type=Path, nargs="+")
    installer.add_argument("--into", type=Path, default=Path("build/gpu/site"))
    installer.add_argument("--stage", type=Path, help="collect pieces here, and install once all have come")
    options = parser.parse_args()
    try:
        if options.verb == "describe":
            lines = [json.dumps(describe(), indent=1)]
        elif options.verb == "install":
            lines = [install(options.folders, options.into, options.stage)]
        else:
            target = json.loads(options.target.read_text(encoding="utf-8"))
            kinds = {"extras": options.extras.split(","), "also": options.also, "keep": options.keep}
            lines = pack(target, options.output, **kinds, piece_mib=options.piece)
    except Missing as reason:
        sys.stderr.write(f"{reason}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
