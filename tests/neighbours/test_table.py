"""The table of docs/rewards.md is of the releases that `make neighbours` drives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) \| \d{4}-\d\d-\d\d \| ", re.M)


def test_the_table_has_the_releases_that_are_driven():
    page = (HERE.parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    listed = tomllib.loads((HERE / "neighbours.toml").read_text(encoding="utf-8")).values()
    assert dict(ROW.findall(page)) == {one["title"]: one["requires"][0].split("==")[1] for one in listed}
