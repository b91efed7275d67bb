"""The table of docs/rewards.md is of the releases that `make neighbours` drives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from table import PROGRAMS

HERE = Path(__file__).parent
ROW = re.compile(r"^\| ([\w-]+) \| ([\w.]+) \| \d{4}-\d\d-\d\d \| ", re.M)


def test_every_judge_s_program_has_its_row():
    page = (HERE.parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for program, reward in PROGRAMS.values():
        assert re.search(rf"^\| {re.escape(program)} \| {re.escape(reward)} \| (?!\*\*not)", page, re.M), program


def test_the_table_has_the_releases_that_are_driven():
    page = (HERE.parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    named = tomllib.loads((HERE / "neighbours.toml").read_text(encoding="utf-8"))
    listed = [one for name, one in named.items() if name != "judges"]  # whose programs have a table of their own
    rows = dict(ROW.findall(page))
    copies = {one["title"] for one in listed if "copy" in one}  # whose commit is that of the copy
    assert {title: version for title, version in rows.items() if title not in copies} == {
        one["title"]: one["requires"][0].split("==")[1] for one in listed if "copy" not in one
    }
    assert all(re.fullmatch("[0-9a-f]{10}", rows[title]) for title in copies)
