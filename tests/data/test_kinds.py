"""Every kind of data file is read as the same rows; a damaged or unknown one is named."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from functools import partial
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest

from tests.conversations import png, references
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.media import PathRules, open_image
from vlmrm.errors import ConfigError, DataError, RowError

ROWS = [{"prompt": f"q{i}; or, not", "chosen": "good", "rejected": "bad", "margin": i / 2} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_csv(separator: str) -> bytes:
    return pd.DataFrame(ROWS).to_csv(index=False, sep=separator).encode()


def as_arrow(writer) -> bytes:
    target, table = pa.BufferOutputStream(), pa.Table.from_pylist(ROWS)
    with writer(target, table.schema) as file:
        file.write_table(table)
    return target.getvalue().to_pybytes()


KINDS = {
    "plain.jsonl": LINES,
    "plain.json": json.dumps(ROWS).encode(),
    "plain.csv": as_csv(","),
    "plain.parquet": pd.DataFrame(ROWS).to_parquet(),
    "rows.tsv": as_csv("\t"),
    "rows.csv": as_csv(";"),
    "bars.csv": as_csv("|"),
    "rows.JSONL": LINES,
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "rows.csv.gz": gzip.compress(as_csv(",")),
    "rows.arrow": as_arrow(pa.ipc.new_file),
    "stream.arrow": as_arrow(pa.ipc.new_stream),
    "rows.feather": as_arrow(partial(pa.ipc.new_file, options=pa.ipc.IpcWriteOptions(compression="lz4"))),
}


def load(path: Path | str, **keys) -> list:
    dataset = load_comparisons([str(path)], arguments=DataArguments(**keys))
    return [row["comparison"] for row in dataset]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_same_rows(name, tmp_path, caplog):
    (tmp_path / name).write_bytes(KINDS[name])
    rows = load(tmp_path / name)
    assert [text_of(row.prompt) for row in rows] == [row["prompt"] for row in ROWS]
    assert [row.judgement.margin for row in rows] == [0, 0.5, 1]
    assert [row.id for row in rows] == [f"{name}:{i}" for i in (1, 2, 3)]
    assert ("are separated by" in caplog.text) == (name in ("rows.csv", "bars.csv"))


def test_compressed_files_keep_their_media_and_line_numbers(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    shown = json.dumps({**ROWS[0], "image": "a.png"}).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(shown + b"\n{broken\n"))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: line 2 is not valid json"):
        load(tmp_path)
    first, second = load(tmp_path, bad_rows="skip")
    assert references(first.prompt) == [str(tmp_path / "a.png")]
    assert isinstance(second, RowError) and second.row_id == "rows.jsonl.gz:2"
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz cannot be decompressed"):
        load(tmp_path / "cut.jsonl.gz")


def test_an_excel_file_is_read_or_needs_openpyxl(tmp_path, monkeypatch, caplog):
    with pd.ExcelWriter(tmp_path / "rows.xlsx") as file:
        rows = [*ROWS, {"prompt": 4, "chosen": 2, "rejected": "3"}]
        pd.DataFrame(rows).to_excel(file, sheet_name="pairs", index=False)
        pd.DataFrame().to_excel(file, sheet_name="notes")
    *_, last = load(tmp_path / "rows.xlsx")
    assert text_of(last.prompt) == "4" and text_of(last.answers[0]) == "2", "numbers among texts are texts"
    assert "only its first sheet, pairs, is read" in caplog.text
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "other.xlsx").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"other\.xlsx is an Excel file and needs openpyxl: pip install"):
        load(tmp_path / "other.xlsx")


def test_the_kinds_are_listed_for_an_unknown_one(tmp_path):
    for name in ("rows.txt", "rows.parquet.gz", "rows.zip"):
        (tmp_path / name).write_bytes(LINES)
        with pytest.raises(DataError, match=rf"{name} is of no kind that can be read: use parquet, arrow, .*zst"):
            load(tmp_path / name)


def test_a_hub_image_column_in_arrow_stays_encoded(tmp_path):
    features = datasets.Features({**dict.fromkeys(ROWS[0], datasets.Value("string")), "image": datasets.Image()})
    features["margin"] = datasets.Value("float64")
    table = datasets.Dataset.from_list([{**ROWS[0], "image": {"bytes": png(), "path": None}}], features=features)
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.data.schema) as writer:
        writer.write_table(table.data.table)
    assert references(load(tmp_path / "rows.arrow")[0].prompt) == [png()]


def test_a_url_is_refused_by_name():
    for url in ("https://host.example/rows.jsonl", "https://host.example/rows.jsonl?download=1", "s3://bucket/rows"):
        with pytest.raises(DataError, match=rf"{re.escape(url)} is a URL, .* download the file and give its path"):
            load(url)


def test_base64_without_a_header_is_an_image(tmp_path):
    row = {**ROWS[0], "images": [base64.encodebytes(png()).decode()], "image": "a.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [comparison] = load(tmp_path / "rows.jsonl")
    embedded, path = references(comparison.prompt)
    assert open_image(embedded).size == (30, 30) and path == str(tmp_path / "a.png")
    rules = PathRules("/data")
    video = base64.b64encode(b"\x00\x00\x00\x20ftypisom" + bytes(80)).decode()
    assert rules(video) == f"data:video/mp4;base64,{video}"
    assert rules("/9j/cat.jpg") == "/9j/cat.jpg" and rules("iVBORw0KGgo") == "/data/iVBORw0KGgo"
