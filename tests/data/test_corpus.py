"""Layouts as they are met: each is read as its author meant, or refused by a sentence that names the column.

`corpus` has a file for each layout, with real-shaped rows beside what they mean: the messages of the prompt and of
each answer, and the order of the answers (`0>2=1`) with its weight. The rows of a refused layout have a part of the
reason.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tests.conversations import png, references
from vlmrm import cli
from vlmrm.conversation import Comparison, Message, Part, Text, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.canonical import canonical, write_row
from vlmrm.data.check import check_data, format_report
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.rows import read_row
from vlmrm.errors import DataError, RowError, UnreadColumnError
from vlmrm.formats import LAYOUTS
from vlmrm.scoring.offline import OfflineJob


def as_base64(colour: str = "red") -> str:
    return base64.b64encode(png(colour)).decode()


PAIR = {"chosen": "A cat.", "rejected": "A dog."}
ASKED = {**PAIR, "prompt": "What is this?"}
SHOWN = {**ASKED, "images": ["images/0.png"]}
TURNS = [{"role": "user", "content": "What is this?"}]
WHOLE = {
    "chosen": [*TURNS, {"role": "assistant", "content": "A cat."}],
    "rejected": [*TURNS, {"role": "assistant", "content": "A dog."}],
}
DRAWN = {"prompt": "a cat", "chosen_image": "images/0.png", "rejected_image": "images/1.png"}

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def meaning(comparison: Comparison, folder: str) -> dict[str, Any]:
    """Return what a row was read as, in the words of the corpus."""

    def texts(messages: Sequence[Message]) -> list[str]:
        return [f"{m.role}: " + "".join(map(part_text, m.content)) for m in messages]

    def part_text(part: Part) -> str:
        return part.text if isinstance(part, Text) else f"[{part.kind} {os.path.relpath(str(part.reference), folder)}]"

    judgements: dict[str, float] = {}
    for judgement in comparison.judgements:
        pairs = sorted(zip(judgement.values, judgement.answers, strict=True), key=lambda it: (-it[0], it[1]))
        order = str(pairs[0][1])
        for (before, _), (value, answer) in pairwise(pairs):
            order += f"{'>' if before > value else '='}{answer}"
        judgements[order] = judgements.get(order, 0.0) + judgement.weight
    return {
        "prompt": texts(comparison.prompt),
        "answers": [*map(texts, comparison.answers)],
        "judgements": {order: pytest.approx(weight) for order, weight in judgements.items()},
    }


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_layout_is_read_as_meant_or_refused(file, tmp_path):
    rows = rows_of(file)
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(line["row"]) + "\n" for line in rows))
    if "refused" in rows[0]:
        for line in rows:
            with pytest.raises(DataError, match=line["refused"]):
                read_row(line["row"], "row", str)
        with pytest.raises(DataError, match=rows[0]["refused"]):
            raise next(error for error in errors_of(table) if error)
        return
    arguments = DataArguments(outputs=rows[0].get("outputs"), columns=rows[0].get("columns"))
    for line, read in zip(rows, load_comparisons([str(table)], arguments=arguments), strict=True):
        comparison = read["comparison"]
        assert isinstance(comparison, Comparison), comparison
        expected = line["canonical"]
        assert meaning(comparison, str(tmp_path)) == {
            key: expected[key] for key in ("prompt", "answers", "judgements")
        }
        if "id" in expected:
            assert comparison.id == expected["id"]
        assert comparison.category == expected.get("category")
        assert comparison.judgement.margin == expected.get("margin")


def errors_of(table: Path) -> list[DataError | None]:
    try:
        return [
            it["comparison"] if isinstance(it["comparison"], RowError) else None
            for it in load_comparisons([str(table)], arguments=DataArguments())
        ]
    except DataError as error:
        return [error]


def test_canonical_rows_mean_the_same_for_every_layout():
    for file in CORPUS:
        for line in rows_of(file):
            if "canonical" in line and "columns" not in line:
                comparison = canonical(read_row(line["row"], "row", lambda it: it, outputs=None))
                row = write_row(comparison)
                assert canonical(read_row(row, "row", lambda it: it, outputs=None)) == comparison, file.stem


# The only layouts with the columns of more general ones, which come after them.
GENERAL = {"LLaMA-Factory alpaca": ["chosen / rejected"], "LLaMA-Factory sharegpt": ["chosen / rejected"]}


def test_no_two_layouts_are_confused():
    lines = [line for file in CORPUS for line in rows_of(file) if "layout" in line]
    for line in lines:
        columns = frozenset(name for name, value in line["row"].items() if value is not None)
        matching = [layout.name for layout in LAYOUTS if layout.matches(columns)]
        assert matching == [line["layout"], *GENERAL.get(line["layout"], [])]
    assert {line["layout"] for line in lines} == {layout.name for layout in LAYOUTS}


SWIFT = {"messages": WHOLE["chosen"], "rejected_response": "A dog."}
VERDICT = {"prompt": "What?", "response_a": "A cat.", "response_b": "A dog.", "winner": "a"}
RATED = [{"response": text, "score": 1, "image": "images/0.png"} for text in "ab"]
# Columns and fields that nothing reads, beside those of a layout; the first of them is named.
UNREAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (ASKED, {"file_name": "images/0.png"}),
    (ASKED, {"image_path": "elsewhere/0.png"}),
    (ASKED, {"Images": ["images/0.png", "images/1.png"]}),
    (ASKED, {"link": "https://host.example/0.JPG"}),
    (ASKED, {"content": as_base64()}),
    (ASKED, {"media": [{"type": "image", "path": "images/0.png"}]}),
    (SHOWN, {"thumbnail": f"data:image/png;base64,{as_base64('blue')}"}),
    (DRAWN, {"source_image": "images/2.png"}),
    (PAIR, {"query": TURNS}),
    (ASKED, {"history": [["Hello", "Hi"]]}),
    (ASKED, {"context": "A letter of 1912."}),
    ({**PAIR, "instruction": "Name the animal."}, {"prompt": "What is this?"}),
    (SWIFT, {"system": "Be kind."}),
    (VERDICT, {"image_a": "images/0.png", "image_b": "images/1.png"}),
    (WHOLE, {"prompt": [{"role": "user", "content": "Which animal?"}]}),
]
# Those inside of columns.
UNREAD_FIELDS = {
    "image": {"prompt": "a cat", "completions": RATED},
    "file": {
        "input": {"messages": TURNS, "file": "images/0.png"},
        "preferred_output": [{"role": "assistant", "content": "A"}],
        "non_preferred_output": [{"role": "assistant", "content": "B"}],
    },
}
REFUSED = [({**row, **unread}, next(iter(unread))) for row, unread in UNREAD]
REFUSED += [(row, field) for field, row in UNREAD_FIELDS.items()]

# What a row has, and the images that are read.
READ: dict[str, tuple[dict[str, Any], int]] = {
    "metadata": ({**ASKED, "source": "vqa", "prompt_id": "a1", "model": "m-7b", "num_images": 0, "rating": 4.5}, 0),
    "ids that are file names": ({**SHOWN, "caption_id": "1.jpg#2", "image_id": "0.png", "file_name": "0.png"}, 1),
    "where the image came from": ({**SHOWN, "image_path": "coco/7.jpg", "image_url": "https://host.example/7.jpg"}, 1),
    "the prompt once more": ({**ASKED, "question": "What is this?", "messages": WHOLE["chosen"]}, 0),
    "whole conversations and their prompt": ({**WHOLE, "prompt": TURNS, "prompt_id": "a1"}, 0),
    "a place in a text": ({**SHOWN, "prompt": "<image>\nWhat is this?", "question": "What is this?"}, 1),
    "ratings": ({**ASKED, "chosen_scores": [3, 3, 4], "evals": ["true", "false"], "context": ""}, 0),
    "HPSv3": ({"prompt": "a", "path1": "images/0.png", "path2": "images/1.png", "model1": "x", "confidence": 0.9}, 2),
    "HPSv3 with a picture to edit": (
        {"prompt": "a", "path1": "images/0.png", "path2": "images/1.png", "images": ["images/2.png"]},
        3,
    ),
    "Pick-a-Pic": (
        {
            **{"caption": "a cat", "jpg_0": "images/0.png", "jpg_1": "images/1.png", "label_0": 1.0, "label_1": 0.0},
            **{"image_0_url": "https://host.example/0.png", "image_0_uid": "u", "has_label": True},
        },
        2,
    ),
}


def written(folder: Path, row: dict[str, Any]) -> str:
    """Two rows beside a folder of images."""
    (folder / "images").mkdir()
    for number, colour in enumerate(("red", "green", "blue")):
        (folder / "images" / f"{number}.png").write_bytes(png(colour))
    file = folder / "rows.jsonl"
    file.write_text(2 * (json.dumps(row) + "\n"))
    return str(file)


@pytest.mark.parametrize(("row", "column"), REFUSED)
def test_a_column_that_would_be_dropped_is_named(row, column, tmp_path):
    path = written(tmp_path, row)
    for bad_rows in ("error", "skip"):
        with pytest.raises(DataError, match=rf"rows\.jsonl: the column `{column}` holds .* is not read:"):
            load_comparisons([path], arguments=DataArguments(bad_rows=bad_rows))
    with pytest.raises(DataError, match=rf"rows\.jsonl: the column `{column}` holds"):
        OfflineJob("model", [path], tmp_path / "out").open_rows()


@pytest.mark.parametrize("name", READ)
def test_metadata_stays_with_the_row(name, tmp_path):
    row, images = READ[name]
    path = written(tmp_path, row)
    first, second = load_comparisons([path], arguments=DataArguments())
    comparison = first["comparison"]
    assert not isinstance(comparison, RowError), comparison
    read = [reference for talk in comparison.conversations() for reference in references(talk.messages)]
    assert len(set(read)) == images
    assert row.get("prompt", row.get("caption")) in (text_of(comparison.prompt), TURNS, "<image>\nWhat is this?")
    assert not isinstance(second["comparison"], RowError)
    assert len(OfflineJob("model", [path], tmp_path / "out").open_rows()) == 2


def test_embedded_images_under_another_name_are_named(tmp_path):
    features = datasets.Features(
        {**{name: datasets.Value("string") for name in ASKED}, "photograph": datasets.Image()}
    )
    row = {**ASKED, "photograph": {"bytes": png(), "path": None}}
    datasets.Dataset.from_list([row], features=features).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: the column `photograph` holds an image"):
        load_comparisons([str(tmp_path / "rows.parquet")], arguments=DataArguments())
    with pytest.raises(UnreadColumnError, match="`photograph` holds an image"):
        read_row({**ASKED, "photograph": Image.new("RGB", (30, 30))}, "r", lambda reference: reference)


def test_a_row_unlike_the_first_is_bad(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{**ASKED, "query": None}] * 30 + [{**PAIR, "query": "What is this?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    *_, last = load_comparisons([str(file)], arguments=DataArguments())
    assert isinstance(last["comparison"], UnreadColumnError) and last["comparison"].row_id == "rows.jsonl:31"


def test_check_data_ends_with_an_error(tmp_path, capsys):
    path = written(tmp_path, {**ASKED, "file_name": "images/0.png"})
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.check_data(path))
    assert stopped.value.code == 3
    said = capsys.readouterr().err
    assert "error: rows.jsonl: the column `file_name`" in said and "--columns images=file_name" in said


def test_columns_that_are_not_read_are_listed_once(tmp_path, caplog):
    path = written(tmp_path, {**SHOWN, "rationale": "because " * 50, "note": "short", "image_path": "coco/7.jpg"})
    load_comparisons([path], arguments=DataArguments())
    assert "rows.jsonl: not read: `image_path`, `note`, `rationale`" in caplog.text
    report = check_data(DataArguments(dataset_path=path))
    assert "columns that are not read: rationale, note, image_path" in format_report(report)
