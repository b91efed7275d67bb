"""Data of any layout, converted, are the same comparisons."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.conversations import references
from vlmrm import cli
from vlmrm.conversation import Comparison
from vlmrm.data.arguments import DataArguments
from vlmrm.data.canonical import canonical
from vlmrm.data.comparisons import load_comparisons

USER, GOOD, BAD = (
    {"role": "user", "content": "What is this?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "assistant", "content": "A dog."},
)
PAIR = {"prompt": "What is this?", "chosen": "A cat.", "rejected": "A dog."}
VIDEO = {"type": "video", "video": "clip.mp4", "fps": 1.0}
LAYOUTS: dict[str, list[dict]] = {
    "texts": [PAIR, {**PAIR, "prompt": "Why?", "category": "vqa", "margin": 0.5, "weight": 2.0, "source": "web"}],
    "images": [{**PAIR, "images": ["a.png", "b.png"]}, {**PAIR, "prompt": "Look: <image> and?", "image": "a.png"}],
    "system": [{**PAIR, "system": "Be kind.", "image": "b.png"}],
    "no prompt": [{"chosen": "A cat.", "rejected": "A dog."}, {"images": ["a.png"], "chosen": "x", "rejected": "y"}],
    "ties and ids": [{**PAIR, "tie": True, "id": "first"}, {**PAIR, "id": "second", "votes": 3, "easy": True}],
    "messages": [{"prompt": [USER, GOOD, USER], "chosen": [GOOD, USER, BAD], "rejected": [BAD], "images": ["a.png"]}],
    "hh": [{"chosen": "\n\nHuman: Hi?\n\nAssistant: Hi!", "rejected": "\n\nHuman: Hi?\n\nAssistant: No."}],
    "a text like hh's": [{**PAIR, "prompt": [{**USER, "content": "\n\nHuman: Hello"}]}],
    "ms-swift": [
        {"messages": [{**USER, "content": "<image>?"}, GOOD], "images": ["a.png"], "rejected_images": ["b.png"]},
        {"messages": [USER, GOOD], "rejected_response": "A dog."},
    ],
    "ranked list": [{"prompt": "What?", "responses": ["a", "b", "c"], "scores": [1, 1, 0.5], "image": "a.png"}],
    "ratings of two": [{"prompt": "What?", "responses": ["a", "b"], "scores": [0, 3]}],
    "text-to-image": [{"prompt": "a cat", "chosen_image": "a.png", "rejected_image": "b.png", "images": ["a.png"]}],
    "rated images": [{"prompt": "a cat", "response_images": ["a.png", "b.png"], "scores": [0.25, 0.5]}],
    "Pick-a-Pic": [{"caption": "a cat", "jpg_0": "a.png", "jpg_1": "b.png", "label_0": v} for v in (0, 0.5, 1)],
    "ImageReward": [{"prompt": "a cat", "generations": ["a.png", "b.png", "c.png"], "ranking": [2, 1, 2]}],
    "raters": [{"prompt": "What?", "responses": ["a", "b"], "ranks": {"ann": [1, 2], "bob": [2, 1]}}],
    "videos": [{**PAIR, "prompt": [{"role": "user", "content": [VIDEO, {"type": "text", "text": "?"}]}]}],
    "two videos and a verdict": [{"prompt": "a cat", "video_a": "a.mp4", "video_b": "b.mp4", "preference": "B"}],
    "frames": [{**PAIR, "videos": [["a.png", "b.png"]]}],
}


@cache
def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((40, 40), 90).resize((80, 80)).rotate(seed).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "c.png"):
        Path(name).write_bytes(png(ord(name[0])))
    for name in ("clip.mp4", "a.mp4", "b.mp4"):
        Path(name).write_bytes(name.encode())
    return tmp_path


def write(name: str, rows: list[dict]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def load(*paths: str, **keys) -> list[Comparison]:
    rows = load_comparisons(paths, arguments=DataArguments(**keys))
    return [row["comparison"] for row in rows]


def run(*words: str) -> None:
    cli.run(lambda: cli.app(list(words), result_action="return_value"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_layout_reads_as_the_same_comparisons(name, here):
    path = write("rows.jsonl", LAYOUTS[name])
    run("convert", path, "--output", "sub/out.jsonl")
    before, after = ([canonical(row) for row in load(file)] for file in (path, "sub/out.jsonl"))
    assert after == before


def test_conversion_keeps_which_answer_came_first(here, capsys):
    rows = [
        {"prompt": f"q{i}", "response_a": "yes", "response_b": "no", "preference": "aab"[i % 3]} for i in range(30)
    ]
    path = write("rows.jsonl", rows)
    run("convert", path, "--output", "out.jsonl")
    firsts = []
    for file in (path, "out.jsonl"):
        capsys.readouterr()
        run("rulers", file)
        firsts += [line for line in capsys.readouterr().out.splitlines() if line.startswith("first ")]
    assert firsts[0] == firsts[1] and "66.7 (" in firsts[0]


def test_all_layouts_fit_into_one_file(here):
    paths = [write(f"{number}.jsonl", rows) for number, rows in enumerate(LAYOUTS.values())]
    run("convert", *paths, "--output", "all.jsonl")
    assert [canonical(row) for row in load("all.jsonl")] == [canonical(row) for row in load(*paths)]


def test_embedded_images_survive_in_a_text_file(here):
    rows = [{**PAIR, "images": [{"bytes": png(1), "path": None}]}]
    datasets.Dataset.from_list(rows).to_parquet("rows.parquet")
    run("convert", "rows.parquet", "--output", "out.jsonl")
    [reference] = references(load("out.jsonl")[0].prompt)
    assert reference == "data:image/png;base64," + base64.b64encode(png(1)).decode()


def test_paths_below_the_output_are_relative(here):
    Path("data").mkdir()
    Path("data/near.png").write_bytes(png(1))
    path = write("rows.jsonl", [{**PAIR, "images": ["data/near.png", "a.png"]}])
    run("convert", path, "--output", "data/out.jsonl")
    [asked] = json.loads(Path("data/out.jsonl").read_text())["prompt"]
    near, far, _ = asked["content"]
    assert (near["image"], far["image"]) == ("near.png", str(here / "a.png"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert rows.jsonl --output rows.jsonl", "rows.jsonl exists already"),
        ("convert rows.jsonl --output out.csv", "name a .jsonl file"),
        ("convert --output out.jsonl", "nothing to read"),
        ("convert bad.jsonl --output out.jsonl", "row bad.jsonl:2: the answers are the same"),
        ("convert same.jsonl --output out.jsonl --bad-rows skip", "none of 1 row can be read"),
    ],
)
def test_a_mistake_costs_one_sentence_and_no_file(words, message, here, capsys):
    write("rows.jsonl", [PAIR])
    same = {**PAIR, "rejected": PAIR["chosen"]}
    write("bad.jsonl", [PAIR, same])
    write("same.jsonl", [same])
    before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    with pytest.raises(SystemExit):
        run(*words.split())
    captured = capsys.readouterr().err.strip().splitlines()[-1]
    assert captured.startswith("error: ") and message in captured
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before
