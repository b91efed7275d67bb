"""Every sample row in docs/data.md is read."""

import json
import re
from pathlib import Path

from vlmrm.data.rows import read_row
from vlmrm.formats import LAYOUTS, detect_layout

DOCS = (Path(__file__).parents[2] / "docs/data.md").read_text()


def samples() -> list[dict]:
    decoder, rows = json.JSONDecoder(), []
    for block in re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL):
        while block.strip():
            row, end = decoder.raw_decode(block.strip())
            rows.append(row)
            block = block.strip()[end:]
    return [row for row in rows if "role" not in row]


def test_samples_are_read_and_cover_every_layout():
    rows = samples()
    for row in rows:
        assert len(read_row(row, "docs", lambda reference: reference, outputs=None).answers) >= 2
    assert {detect_layout(row).name for row in rows} == {layout.name for layout in LAYOUTS}
