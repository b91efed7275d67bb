"""The file of results: the rows of each part as they are measured, so that nothing measured is measured again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS, PAGE = "results.json", "index.html"


@dataclass
class PartResult:
    """What a part has measured, in `seconds` so far.

    `done` says that no case is left, `running` is the case under way, and `cut` are those that the part's budget left
    out, with the second at which it ended; the next run takes them up.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False
    cut: dict[str, float] = field(default_factory=dict)
    running: str = ""

    def holds(self, attempt: str) -> bool:
        """Return whether a case was measured, has failed, or lacked something to run."""
        return any(row["attempt"] == attempt for row in self.rows)

    def keep(self, attempt: str, rows: list[dict[str, Any]]) -> None:
        """Add the rows of a case, in place of former ones."""
        self.rows = [row for row in self.rows if row["attempt"] != attempt]
        self.rows += [row | {"attempt": attempt} for row in rows]
        self.cut.pop(attempt, None)

    def report(self) -> list[dict[str, Any]]:
        """Return the rows, and one for each case that was cut."""
        return self.rows + [
            {"case": case, "measured": None, "unit": "", "status": f"cut at {second:.0f} s"}
            for case, second in self.cut.items()
        ]


@dataclass
class Results:
    """The parts by name, on one machine; `where` describes it."""

    path: Path
    tiny: bool = False
    where: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, PartResult] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, tiny: bool = False) -> Results:
        """Return the results of a folder; empty ones where it has none of the same mode."""
        path = folder / RESULTS
        empty = cls(path, tiny)
        if not path.is_file():
            return empty
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["tiny"] != tiny:
            return empty
        parts = {name: PartResult(**part) for name, part in content["parts"].items()}
        return cls(path, tiny, content["where"], parts)

    def part(self, name: str) -> PartResult:
        return self.parts.setdefault(name, PartResult())

    def merge(self, newer: Results) -> None:
        """Take over the rows of `newer`, which replace those of the same case.

        Raises:
            ValueError: when they are of another machine, whose figures do not stand beside these.
        """
        if self.where and newer.where and self.where["gpu"] != newer.where["gpu"]:
            raise ValueError(f"{newer.path} is of {newer.where['gpu']}, and {self.path} of {self.where['gpu']}")
        self.where = self.where or newer.where
        for name, part in newer.parts.items():
            before = self.part(name)
            replaced = {row["attempt"] for row in part.rows}
            before.rows = [row for row in before.rows if row["attempt"] not in replaced] + part.rows
            before.seconds += part.seconds
            before.done = before.done or part.done
            before.cut = {case: at for case, at in (before.cut | part.cut).items() if not before.holds(case)}

    def save(self) -> None:
        """Write the file at once, or not at all: a process may be killed at any moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": "gpu", "tiny": self.tiny, "where": self.where}
        content |= {"parts": {name: asdict(part) for name, part in self.parts.items()}}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1, default=float) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def failures(self, names: Iterable[str]) -> list[str]:
        """Return what went wrong in the parts of these names: one line for each row that failed."""
        return [
            f"{name}: {row['case']}: {row['status']}"
            for name in names
            if name in self.parts
            for row in self.parts[name].rows
            if row.get("failed")
        ]
