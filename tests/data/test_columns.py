"""`columns` reads data whose columns have other names, in every command, and `images` says whether rows have any."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.conversations import references
from vlmrm import cli
from vlmrm.config import parse
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.check import check_data
from vlmrm.data.columns import parse_columns
from vlmrm.data.comparisons import load_comparisons
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.scoring.offline import OfflineJob

ROW = {"query": "What is this?", "picture": "a.png", "better": "A cat.", "worse": "A dog."}
COLUMNS = {"prompt": "query", "images": "picture", "chosen": "better", "rejected": "worse"}
CANONICAL = {"prompt": "What is this?", "images": ["a.png"], "chosen": "A cat.", "rejected": "A dog."}


def write(path: Path, *rows: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (30, 30), "red").save(path.parent / "a.png")
    return str(path)


def load(*paths: str, **keys):
    arguments = DataArguments(**keys)
    return [row["comparison"] for row in load_comparisons(paths, arguments=arguments)]


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_renamed_columns_read_like_the_canonical_ones(bad_rows, tmp_path):
    path, canonical = write(tmp_path / "theirs.jsonl", ROW, ROW), write(tmp_path / "ours.jsonl", CANONICAL)
    first, _ = load(path, columns=COLUMNS, bad_rows=bad_rows)
    [same] = load(canonical)
    assert (first.prompt, first.answers, first.judgements) == (same.prompt, same.answers, same.judgements)
    # A canonical file beside it needs no mapping.
    assert len(load(path, canonical, columns=COLUMNS)) == 3


@pytest.mark.parametrize(
    "words", [["--columns", *(f"{ours}={theirs}" for ours, theirs in COLUMNS.items())], ["config.yaml"]]
)
def test_columns_come_as_words_or_yaml(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("columns:\n" + "".join(f"  {ours}: {it}\n" for ours, it in COLUMNS.items()))
    [arguments] = parse([DataArguments], words, "test")
    assert arguments.column_names == COLUMNS


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image_s": "picture"}, "did you mean images?"),
        ({"picture": "images"}, "write images=picture"),
        (["images=picture", "images=photo"], "names images twice"),
        ({"images": "picture", "image": "picture"}, "reads picture twice"),
        ("picture", "'picture'"),
        ({"images": 3}, "names no column"),
        ({"contest": "ignore"}, "write ignore=contest"),
    ],
)
def test_a_mapping_that_cannot_be_meant_is_refused(columns, message):
    with pytest.raises(ConfigError, match="columns") as caught:
        parse_columns(columns)
    assert message in str(caught.value)


def test_an_absent_or_duplicate_column_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROW)
    with pytest.raises(DataError, match=r"images=pictur.*rows\.jsonl has no column `pictur`: did you mean picture"):
        load(path, columns={**COLUMNS, "images": "pictur"})
    both = write(tmp_path / "both.jsonl", {**ROW, "images": ["b.png"]})
    with pytest.raises(DataError, match=r"both\.jsonl has a column `images` of its own beside `picture`"):
        load(both, columns=COLUMNS)
    # Two columns may exchange their names.
    flipped = write(tmp_path / "flipped.jsonl", CANONICAL)
    [row] = load(flipped, columns={"chosen": "rejected", "rejected": "chosen"})
    assert text_of(row.answers[0]) == "A dog."


def test_an_unread_column_shows_its_mapping(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "?", "photo": "a.png", "chosen": "A", "rejected": "B"})
    with pytest.raises(DataError, match=r"`photo` holds an image .* --columns images=photo"):
        load(path)
    assert references(load(path, columns={"images": "photo"})[0].prompt) == [str(tmp_path / "a.png")]
    path = write(tmp_path / "query.jsonl", {"query": "?", "system_prompt": "Be kind.", "chosen": "A", "rejected": "B"})
    for columns, said in ({}, "prompt=query"), ({"prompt": "query"}, "system=system_prompt"):
        with pytest.raises(DataError, match=f"--columns {said}"):
            load(path, columns=columns)


def test_a_column_is_ignored_by_its_name(tmp_path):
    text = {"question": "?", "answer1": "A", "answer2": "B", "winner": "answer1"}
    path = write(tmp_path / "rows.jsonl", {**text, "contest": 858, "contexts": "Some.", "photo": "a.png"})
    with pytest.raises(DataError, match=r"`contexts` .*leave it out with --columns ignore=contexts"):
        load(path, columns={"images": "photo"})
    [row] = load(path, columns={"ignore": ["contexts", "photo"]})
    assert row.columns["contest"] == 858, "a number is no text of a prompt"
    assert "contexts" not in row.columns and not references(row.prompt)
    [same] = load(path, columns=["ignore=contexts", "ignore=photo"])
    assert same == row


def test_hub_image_folders_are_read_without_mapping(tmp_path):
    text = {"prompt": "What is this?", "chosen": "A cat.", "rejected": "A dog."}
    drawn = {"prompt": "a cat", "chosen_image_file_name": "a.png", "rejected_image_file_name": "b.png"}
    for number, (row, images) in enumerate(
        [
            ({**text, "file_name": "a.png"}, ["a.png"]),
            ({**text, "file_names": ["a.png", "b.png"]}, ["a.png", "b.png"]),
            ({**text, "image_file_name": "a.png"}, ["a.png"]),
            (drawn, ["a.png", "b.png"]),
            ({**CANONICAL, "file_name": "a.png"}, ["a.png"]),
        ]
    ):
        folder = tmp_path / str(number)
        write(folder / "metadata.jsonl", row)
        write(folder / "images" / "train_1.jsonl.txt", row)
        [comparison] = load(str(folder / "metadata.jsonl"))
        read = [reference for talk in comparison.conversations() for reference in references(talk.messages)]
        assert list(dict.fromkeys(read)) == [str(folder / name) for name in images]
    assert len(load(str(tmp_path / "0"))) == 1, "the folder itself"
    datasets.Dataset.from_list([{**text, "file_name": "a.png"}]).to_parquet(tmp_path / "metadata.parquet")
    assert references(load(str(tmp_path / "metadata.parquet"))[0].prompt)


def test_images_says_whether_rows_have_media(tmp_path):
    text = {name: value for name, value in CANONICAL.items() if name != "images"}
    path = write(tmp_path / "rows.jsonl", CANONICAL, {**text, "images": None})
    seen, blind = load(path, images="required")
    assert not isinstance(seen, RowError) and isinstance(blind, RowError)
    assert blind.row_id == "rows.jsonl:2" and "(it has prompt, chosen, rejected)" in blind.reason
    seen, blind = load(path, images="none")
    assert isinstance(seen, RowError) and not isinstance(blind, RowError)
    assert "a.png" in seen.reason and "(its columns are prompt, images, chosen, rejected)" in seen.reason
    assert not any(isinstance(row, RowError) for row in load(path))


def test_every_command_that_reads_data_takes_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, canonical = write(tmp_path / "theirs.jsonl", ROW), write(tmp_path / "ours.jsonl", CANONICAL)
    words = [f"{ours}={theirs}" for ours, theirs in COLUMNS.items()]
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.app(["check-data", path, "--columns", *words, "--images", "required"]))
    assert stopped.value.code == 0 and "the only row can be read" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.app(["leakage", "--train", path, "--eval", canonical, "--columns", *words]))
    assert stopped.value.code == 3 and "1 of 1 evaluation rows" in capsys.readouterr().out
    job = OfflineJob("model", [path], tmp_path / "scores", columns=COLUMNS)
    assert len(job.open_rows()) == 1
    report = check_data(DataArguments(dataset_path=[path], columns=COLUMNS, images="none"))
    assert report.wrong == 1
