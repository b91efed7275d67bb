"""The table of originals in docs/rewards.md: every built-in reward has its row, and every row a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlmrm.rewards.registry import BUILT_IN, OF_ROBOTS

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.search(
    r"<!-- originals -->\n(.*)<!-- end of the originals -->", (ROOT / "docs/rewards.md").read_text("utf-8"), re.DOTALL
)[1]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| `")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_built_in_reward_has_one_row():
    rewards = [name.lower() for row in ROWS for name in names(row[0])]
    known = {*BUILT_IN, *OF_ROBOTS}
    missing = sorted(known - set(rewards))
    assert not missing, f"write a row for {', '.join(missing)} in docs/rewards.md: with what was it compared?"
    assert len(rewards) == len(set(rewards)) and set(rewards) <= known


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_what_holds_it_and_how_far_it_is_off(row):
    _, original, compared, difference, held = row
    for place in names(held):
        file, _, function = place.partition("::")
        [path] = [path for tests in ("tests", "packages/robots/tests") for path in (ROOT / tests).rglob(file)]
        assert f"def {function or 'test_'}" in path.read_text("utf-8"), place
    if compared:
        assert re.match(r"\d|none", difference), f"{original}: how far is it off?"
        numbers = [float(number) for number in re.findall(r"\de-\d+", difference)]
        assert all(number < 1e-5 for number in numbers)
    else:
        assert original.startswith(("our own", "what the server says"))
