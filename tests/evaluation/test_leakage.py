"""What was trained on is found in what is evaluated on, in every disguise the guide names; the rest is not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import datasets
import pandas as pd
import pytest
from PIL import Image as Pillow

from tests.conversations import rated
from tests.evaluation.pictures import picture
from tests.runs import colour_pairs, words, write_rows
from vlmrm import cli
from vlmrm.conversation import Comparison, Image, Message, Video
from vlmrm.errors import RowError
from vlmrm.evaluation.leakage import Leakage, leakage, normalised
from vlmrm.evaluation.sweep import sweep


def message(role: str, text: str, *media) -> Message:
    return Message.of(role, *(Video(m) if isinstance(m, list) else Image(m) for m in media), text)


def row(row_id: str, question: str, *answers: str, images=()) -> Comparison:
    said = [[message("assistant", answer)] for answer in answers]
    return rated(row_id, [message("user", question, *images)], said, range(len(said), 0, -1))


def counts(found: Leakage) -> dict[str, tuple[int, int, int]]:
    """By kind: rows that leak exactly, nearly, and all that have such a thing."""
    return {kind: (found.exact[kind].rows, found.near[kind].rows, found.exact[kind].total) for kind in found.exact}


def test_texts_are_normalised():
    assert normalised("  Ｗhat's\tTHIS?\n") == normalised("whats this") == "whats this"
    assert normalised("5 < 3") != normalised("5 > 3")
    assert normalised("क्या?") == "क्या"


def test_texts_leak_exactly_and_nearly():
    train = [row("t0", "What is this?", "A cat.", "A dog."), row("t1", "Where?", "Here.", "There.")]
    evaluation = [
        row("same", "What is this?", "A cow.", "A hen."),
        row("nearly", "what is  this", "a CAT", "A pig."),
        row("new", "Why?", "Because.", "So."),
    ]
    found = leakage(train, evaluation)
    assert counts(found) == {"prompt": (1, 2, 3), "answer": (0, 1, 3), "image": (0, 0, 0)}
    assert found.exact["prompt"].pairs == [("t0", "same")]
    assert found.near["prompt"].pairs == [("t0", "same"), ("t0", "nearly")]
    assert found.near["prompt"].share == 2 / 3 and math.isnan(found.near["image"].share)


def test_images_leak_by_their_pixels_whatever_the_file(tmp_path):
    for name in ("train", "copy", "other"):
        picture(0 if name != "other" else 1).save(tmp_path / f"{name}.png")
    picture(0).save(tmp_path / "again.jpg", quality=60)
    train = [row("t", "Q", "a", "b", images=[str(tmp_path / "train.png")])]
    asked = {"copy.png": (1, 1, 1), "again.jpg": (0, 1, 1), "other.png": (0, 0, 1)}
    for name, expected in asked.items():
        found = counts(leakage(train, [row("e", "Q", "c", "d", images=[str(tmp_path / name)])]))
        assert (found["image"], found["prompt"]) == (expected, expected), name
    embedded = (tmp_path / "copy.png").read_bytes()
    assert counts(leakage(train, [row("e", "Q", "c", "d", images=[embedded])]))["image"] == (1, 1, 1)


def test_a_question_about_another_image_is_another_prompt():
    found = leakage([row("t", "Q", "a", "b", images=[picture(0)])], [row("e", "Q", "c", "d", images=[picture(1)])])
    assert counts(found) == {"prompt": (0, 0, 1), "answer": (0, 0, 1), "image": (0, 0, 1)}


def test_every_image_of_a_prompt_must_be_near():
    train = [row("t", "Q", "a", "b", images=[picture(0), picture(1)])]
    smaller = [picture(0).resize((80, 60)), picture(1).resize((80, 60))]
    asked = [row("both", "q!", "c", "d", images=smaller), row("one", "q", "c", "d", images=[smaller[0], picture(2)])]
    found = leakage(train, asked)
    assert found.near["prompt"].pairs == [("t", "both")]
    assert found.near["image"].pairs == [("t", "both"), ("t", "one")]


def test_answers_that_are_images_leak_as_answers():
    def drawn(row_id: str, prompt: str, *images: Pillow.Image) -> Comparison:
        return rated(row_id, [message("user", prompt)], [[message("assistant", "", it)] for it in images], [1, 0])

    found = leakage(
        [drawn("t", "A cat.", picture(0), picture(1))], [drawn("e", "A dog.", picture(2), picture(1).resize((90, 70)))]
    )
    assert counts(found) == {"prompt": (0, 0, 1), "answer": (0, 1, 1), "image": (0, 1, 1)}


def test_frames_are_images():
    video = [picture(3), picture(4)]
    found = leakage([row("t", "Q", "a", "b", images=[video])], [row("e", "R", "c", "d", images=[picture(4)])])
    assert found.exact["image"].pairs == [("t", "e")]


def test_rows_that_cannot_be_looked_at_are_named(tmp_path):
    missing, none = (
        row("e0", "Q", "a", "b", images=[str(tmp_path / "gone.png")]),
        row("e1", "Q", "a", "b", images=[None]),
    )
    found = leakage([row("t", "Q", "a", "b")], [missing, none, RowError("no prompt", "e2"), row("e3", "Q", "a", "c")])
    assert [row_id for row_id, _ in found.unreadable] == ["e0", "e1", "e2"]
    assert "gone.png does not exist" in found.unreadable[0][1]
    assert found.exact["prompt"].pairs == [("t", "e3")]


@pytest.fixture
def two_files(tmp_path, monkeypatch) -> None:
    """train.jsonl and eval.jsonl, whose rows are an old question, a new one with an old answer, one without image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    picture(0).save("cat.png")
    picture(0).resize((100, 80)).save("smaller.png")
    pair = {"chosen": "Yes.", "rejected": "No."}
    write_rows(Path("train.jsonl"), [{"prompt": "What is this?", "images": ["cat.png"], **pair}])
    asked = [{"prompt": "what is this", "images": ["smaller.png"]}, {"prompt": "Why?", "images": []}]
    write_rows(Path("eval.jsonl"), [{**row, **pair} for row in [*asked, {"prompt": "Q", "images": ["gone.png"]}]])


def command(words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.app(["leakage", *words.split()], exit_on_error=False, result_action="return_value")
    return int(ended.value.code or 0)


def test_the_json_and_exit_status_tell_leaks(two_files, capsys):
    assert command("--json --train train.jsonl --eval eval.jsonl train.jsonl") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["leaked_rows"], found["unreadable_rows"]) == (4, 2, 1)
    pairs = [["train.jsonl:1", "train.jsonl:1"]]
    assert found["exact"]["prompt"] == {"rows": 1, "total": 3, "share": 1 / 3, "pairs": pairs}
    write_rows(Path("new.jsonl"), [{"prompt": "Where?", "chosen": "Yes.", "rejected": "No."}])
    assert command("--train train.jsonl --eval new.jsonl") == 0  # an equal answer is no leak


def test_a_sweep_measures_leaked_and_new_rows_apart(tmp_path, monkeypatch, tiny_reward_model):
    monkeypatch.chdir(tmp_path)
    data = colour_pairs(tmp_path / "data", 6)
    write_rows(data.parent / "train.jsonl", [json.loads(line) for line in data.read_text().splitlines()[:2]])
    asked = {"model_dirs": tiny_reward_model, "dataset_path": data, "train_data": data.parent / "train.jsonl"}
    result = sweep(words(**asked, output_file="results.csv", interventions="none", save_normalization=False))
    found = json.loads(Path("results.json").read_text())["leakage"]
    frame = pd.read_parquet(result.scores)
    apart = frame.groupby("by/leaked").apply(lambda rows: (rows["chosen_score"] > rows["rejected_score"]).mean())
    assert found["leaked_rows"] == (frame["by/leaked"] == "yes").sum() == 2
    groups = result.rows[0]["statistics"]["by"]["leaked"]
    assert {name: group["preference_accuracy"]["value"] for name, group in groups.items()} == apart.to_dict()
