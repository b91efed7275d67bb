"""Write what `drive.py` proved into docs/rewards.md.

    python tests/neighbours/table.py [--check]

Rows that differ by the date and the last digits alone are left as they are, and so are those of frameworks that were
not driven; --check fails where others differ.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from environments import FOLDER, ROOT

PAGE = ROOT / "docs" / "rewards.md"
START, END = "<!-- neighbours: make neighbours -->\n", "<!-- end of the neighbours -->\n"
# The columns of both tables, each with the checks of drivers that belong to it.
REWARDS = {
    "`load_scorer`'s rewards": ("equal", "equal_texts", "blind"),
    "a broken sample": ("broken",),
    "the service is away": ("away", "away_remote", "late"),
    "a group over two ranks": ("ranks", "ranks_broken"),
    "GDPO of two rewards": ("gdpo", "gdpo_broken"),
}
FRAMES = {
    "episodes in its format": ("written", "read", "video", "progress"),
    "frames as its reward": ("actor",),
}


def cell(checks: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return the verdicts on some checks in words."""
    said = []
    for check in (checks[name] for name in names if name in checks):
        what = (
            check["what"].splitlines()[0].removeprefix("AssertionError: ").replace("|", "/") if check["what"] else ""
        )
        verdict = "proved" if check["proved"] else "**not proved**"
        said.append(f"{verdict}: {what}" if what else verdict)
    return "; ".join(said) or "not driven"


def tables(results: dict[str, Any], written: str) -> str:
    """Return the results as two tables, of rewards and of frames, in place of those that are `written`."""
    before = written.strip().split("\n\n")
    return "\n".join(table(results, *one) for one in zip(before, (REWARDS, FRAMES), strict=True))


def table(results: dict[str, Any], written: str, columns: dict[str, tuple[str, ...]]) -> str:
    """Return a row each framework that has these checks; one that was not driven keeps its row of `written`."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in written.splitlines()}
    lines = [["framework", "version", "driven on", "resolves", *columns], ["---"] * (4 + len(columns))]
    shown = {name for names in columns.values() for name in names}
    for one in results.values():
        cells = [cell(one["checks"], names) for names in (("resolves",), *columns.values())]
        if shown & one["checks"].keys() or not one["checks"]["resolves"]["proved"]:
            lines.append([one["title"], one["version"], one["date"], *cells])
    rows |= {line[0]: f"| {' | '.join(line)} |" for line in lines}
    return "".join(f"{row}\n" for row in rows.values())


def lasting(text: str) -> str:
    """Return the tables without what differs from run to run: dates, and how far off rewards are."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d+e[+-]\d+", "", text)


def main(arguments: list[str]) -> str | None:
    """Write the table; with --check return what to do where the page has another."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    written, after = rest.split(END)
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    proved = f"\n{tables(results, written)}\n"
    if lasting(proved) == lasting(written):
        return None
    if "--check" in arguments:
        return f"The tables in {PAGE} are not what was proved: run `make neighbours`.\n{proved}"
    PAGE.write_text(before + START + proved + END + after, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
