"""Resolve the core beside the trainers of others, and the extras on every Python, without installing: `make resolve`.

A sentence for each combination that does not resolve, with what uv says of it, and exit status 1.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
FOLDERS = {"vlmrm": HERE.parents[1], "vlmrm-robots": HERE.parents[1] / "packages/robots"}
PROJECTS = {
    name: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, folder in FOLDERS.items()
}
SOURCES = tomllib.loads((HERE / "uv.toml").read_text(encoding="utf-8"))["dependency-metadata"]
ENDS = ("3.11", "3.14")
# Without DeepSpeed and flash-attn, which are built where they are installed.
EXTRAS = {
    "vlmrm[train]": ENDS,
    "vlmrm[serve]": ENDS,
    "vlmrm[rewards]": ENDS,
    "vlmrm[ray]": ENDS,
    "vlmrm[latents]": ENDS,
    "vlmrm-robots[frames]": ENDS,
    "vlmrm-robots[vlm]": ENDS,
}


def combinations() -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """Yield a name, the requirements and the Pythons of everything that must resolve."""
    core = PROJECTS["vlmrm"]["dependencies"]
    for neighbour in tomllib.loads((HERE / "neighbours.toml").read_text(encoding="utf-8"))["neighbour"]:
        yield f"the core beside {neighbour['name']}", [*core, *neighbour["requires"]], neighbour["pythons"]
    for extra, pythons in EXTRAS.items():
        yield f"the extra {extra}", requirements_of(extra), pythons
    frames = requirements_of("vlmrm-robots[frames]")
    yield "frames beside LeRobot", [*frames, "lerobot[dataset]>=0.6"], ["3.12"]


def requirements_of(line: str) -> list[str]:
    """Return what a requirement asks for: of a distribution here, what it and its extras require."""
    asked = Requirement(line)
    if asked.name not in PROJECTS:
        return [line]
    project = PROJECTS[asked.name]
    lines = [
        *project["dependencies"],
        *(each for extra in asked.extras for each in project["optional-dependencies"][extra]),
    ]
    return [each for line in lines for each in requirements_of(line)]


def resolve(requirements: Sequence[str], python: str) -> subprocess.CompletedProcess[str]:
    """Return what uv makes of the requirements: a line a package on stdout, or why it cannot on stderr."""
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--system-certs"]
    command += ["--only-binary", ":all:", *(word for each in SOURCES for word in ("--no-binary", each["name"]))]
    command += ["--config-file", HERE / "uv.toml", "--no-header", "--no-annotate", "--python-version", python, "-"]
    return subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True)


def main() -> int:
    tasks = [(name, each, python) for name, each, pythons in combinations() for python in pythons]
    failures = 0
    with ThreadPoolExecutor(4) as pool:  # uv waits for the registry more than it computes
        answers = pool.map(lambda task: resolve(*task[1:]), tasks)
        for (name, _, python), answer in zip(tasks, answers, strict=True):
            failures += answer.returncode != 0
            outcome = answer.stderr if answer.returncode else f"{len(answer.stdout.splitlines())} packages"
            sys.stdout.write(f"{name}, Python {python}: {outcome.strip()}\n")
            sys.stdout.flush()
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
