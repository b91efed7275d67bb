"""A fingerprint tells whether any byte of a data set is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlmrm.data.comparisons import data_fingerprint

MIDDLE = 3 << 20  # further from either end than anybody would read for a sample


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "train" / "pairs.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"a" * MIDDLE + b"chosen" + b"b" * MIDDLE)
    return path


def test_labels_flipped_inside_a_file_are_seen(table):
    before, status = data_fingerprint([str(table)]), table.stat()
    table.write_bytes(table.read_bytes().replace(b"chosen", b"nesohc"))
    assert table.stat().st_size == status.st_size
    assert data_fingerprint([str(table)]) != before


def test_a_fingerprint_survives_moving_but_sees_added_files(table, tmp_path):
    before = data_fingerprint([str(table.parent)])
    table.parent.rename(tmp_path / "elsewhere")
    assert data_fingerprint([str(tmp_path / "elsewhere")]) == before
    os.utime(tmp_path / "elsewhere" / table.name)
    assert data_fingerprint([str(tmp_path / "elsewhere")]) == before, "when it was written does not matter"
    (tmp_path / "elsewhere" / "more.jsonl").write_bytes(b"")
    assert data_fingerprint([str(tmp_path / "elsewhere")]) != before
