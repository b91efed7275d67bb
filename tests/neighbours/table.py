"""Write what `drive.py` proved into docs/rewards.md.

python tests/neighbours/table.py
"""

from __future__ import annotations

import json
from typing import Any

from environments import FOLDER, ROOT

PAGE = ROOT / "docs" / "rewards.md"
START, END = "<!-- neighbours: make neighbours -->\n", "<!-- end of the neighbours -->\n"
# The columns, each with the checks of drivers that belong to it.
COLUMNS = {
    "resolves beside the core": ("resolves",),
    "`load_scorer`'s rewards": ("equal",),
    "a broken sample": ("broken",),
    "the service is away": ("away", "away_remote"),
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


def table(results: dict[str, Any]) -> str:
    """Return the results as a table, a row each framework."""
    lines = [["framework", "version", "driven on", *COLUMNS], ["---"] * (3 + len(COLUMNS))]
    for one in results.values():
        cells = [cell(one["checks"], names) for names in COLUMNS.values()]
        lines.append([one["title"], one["version"], one["date"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    PAGE.write_text(before + START + "\n" + table(results) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
