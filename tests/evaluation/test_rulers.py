"""Rulers: planted shortcuts are found, and a set that needs its images or its question has none."""

import json

import numpy as np
import pytest
from PIL import Image as Pillow

from vlmrm import cli
from vlmrm.conversation import Comparison, Image, Judgement, Message, Video
from vlmrm.errors import DataError, RowError
from vlmrm.evaluation.public import benchmark
from vlmrm.evaluation.rulers import RULERS, meaning, read_rulers

COLOURS = ("red", "blue", "green", "white")


def pair(number, question, better, worse, rng, image=None, category=None):
    """A comparison of two answers, texts or images, in a random order."""
    parts = [Image(f"{image or number}.png"), question] if image != "" else [question]
    order = rng.permutation(2)
    answers = [(Message.of("assistant", (better, worse)[side]),) for side in order]
    judgement = Judgement((0, 1), tuple(float(side == 0) for side in order))
    return Comparison(f"row {number}", (Message.of("user", *parts),), tuple(answers), (judgement,), category)


def of_images(count=400, leak=lambda right, wrong, rng: (f"It is {right}.", f"It is {wrong}.")):
    """What is right only the image knows; `leak` writes the answers."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        right, wrong = rng.choice(COLOURS, 2, replace=False)
        rows.append(pair(number, "What colour is the square?", *leak(right, wrong, rng), rng))
    return rows


def by_name(rows, public=None):
    return {reading.name: reading for reading in read_rulers(rows, public)}


def test_a_set_that_needs_images_has_no_ruler():
    readings = by_name(of_images())
    assert set(readings) == set(RULERS)
    for name in ("longer", "first", "image_blind", "question_blind"):
        accuracy = readings[name].accuracy
        assert accuracy.low <= 0.5 <= accuracy.high and abs(accuracy.value - 0.5) < 0.08, name
    for name in ("more_markdown", "larger_image", "more_images"):
        assert readings[name].verdict.startswith("no answer has ")
    [said] = meaning([*readings.values()])
    assert "No ruler is found above chance" in said


def test_a_ruler_is_never_scored_on_fitted_prompts():
    """Words that occur once tell nothing of other prompts; a model fitted to them would have every pair right."""

    def unique(right, wrong, rng):
        return [f"w{word}" for word in rng.integers(10**9, size=2)]

    for name in ("image_blind", "question_blind"):
        accuracy = by_name(of_images(200, leak=unique))[name].accuracy
        assert accuracy.low < 0.5 < accuracy.high, name


def test_a_position_that_leaks_is_found():
    rows = of_images(100)
    turned = [
        Comparison(row.id, row.prompt, row.answers[::-1], (Judgement((0, 1), row.ratings[::-1]),))
        if number % 5 and row.ratings[0] == 0
        else row
        for number, row in enumerate(rows)
    ]
    reading = by_name(turned)["first"]
    assert reading.accuracy.low > 0.75 and reading.verdict == "above chance"


def test_length_that_leaks_is_found():
    def longer(right, wrong, rng):
        answers = [f"It is {right}, as everybody can see.", f"It is {wrong}."]
        return answers if rng.random() < 0.8 else answers[::-1]

    readings = by_name(of_images(leak=longer))
    assert readings["longer"].accuracy.value == pytest.approx(0.8, abs=0.06)
    assert readings["longer"].verdict == "above chance"
    assert readings["image_blind"].accuracy.low > 0.7


def test_words_that_leak_are_found_without_images():
    def hedged(right, wrong, rng):
        tail = " I am not sure." if rng.random() < 0.5 else " That is certain."
        return (f"It is {right}. That is certain.", f"It is {wrong}.{tail}")

    reading = by_name(of_images(leak=hedged))["image_blind"]
    assert 0.7 < reading.accuracy.value < 0.8  # half of the pairs leak, the other half is a coin


def test_only_the_image_blind_ruler_sees_question_leaks():
    """The right answer follows from the question's opening, so answers without it tell nothing."""
    rng = np.random.default_rng(1)
    rows = []
    for number in range(400):
        opening, right, wrong = [("Is it", "yes", "two"), ("How many", "two", "yes")][number % 2]
        rows.append(pair(number, f"{opening} things?", right, wrong, rng))
    readings = by_name(rows)
    assert readings["image_blind"].accuracy.value > 0.97
    assert readings["question_blind"].accuracy.low <= 0.5 <= readings["question_blind"].accuracy.high
    assert "does not need sight" in " ".join(meaning([*readings.values()]))


def picture(folder, number, brightness, side=40):
    path = folder / f"{number}.png"
    Pillow.new("RGB", (side, side), (brightness,) * 3).save(path)
    return Image(str(path))


def test_answers_that_are_images_are_measured(tmp_path):
    """People chose the brighter image always, the larger one in none: that is a ruler without any question."""
    rng = np.random.default_rng(2)
    rows = []
    for number in range(60):
        bright, dark = rng.integers(140, 250), rng.integers(5, 120)
        answers = picture(tmp_path, 2 * number, bright), picture(tmp_path, 2 * number + 1, dark, side=48)
        rows.append(pair(number, f"A fox number {number}.", *answers, rng, image=""))
    readings = by_name(rows)
    assert readings["question_blind"].accuracy.low > 0.8
    assert "no text" in readings["image_blind"].verdict
    assert readings["larger_image"].verdict.startswith("below chance")


def test_the_number_of_frames_is_a_ruler(tmp_path):
    """Of pairs of episodes the better one is shown with more frames, as a list of images or as a video of frames."""
    frame, rng, rows = picture(tmp_path, 0, 100), np.random.default_rng(3), []
    for number in range(60):
        long, short = [frame] * int(rng.integers(4, 9)), [frame] * int(rng.integers(1, 4))
        sides = [Message.of("assistant", *side) for side in (long, short)]
        if number % 2:
            sides = [Message.of("assistant", Video((frame.reference,) * len(side))) for side in (long, short)]
        prompt = (Message.of("user", "Push it."),)
        columns = {"chosen_episode": f"episodes/{number // 3}"}
        answers = tuple((side,) for side in sides)
        rows.append(Comparison(str(number), prompt, answers, (Judgement((0, 1), (1.0, 0.0)),), None, columns))
    found = by_name(rows)["more_images"]
    assert found.accuracy.value == 1.0 and found.accuracy.clusters == 20 and found.verdict == "above chance"


def test_a_benchmark_is_scored_by_its_own_rule():
    rng = np.random.default_rng(3)
    names = ("general", "hallucination", "reasoning")
    rows = [pair(number, "Why?", "x" * 9, "x", rng, category=names[number % 3]) for number in range(60)]
    public = benchmark("vl-rewardbench")
    readings = read_rulers(rows, public)
    assert readings[0].figures["macro"].value == 1


def test_unreadable_rows_are_left_out_and_named(tmp_path, caplog):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    rng = np.random.default_rng(4)
    rows = [*of_images(30), pair(31, "A fox.", Image(str(broken)), Image(str(broken)), rng)]
    rows.append(RowError("it has no answer", "32"))
    assert by_name(rows)["longer"].accuracy.n == 30
    assert "2 of the rows" in caplog.text and "broken.png is not an image" in caplog.text
    with pytest.raises(DataError, match="no pair that people decided"):
        read_rulers([RowError("it has no answer", "row 1")])


def test_the_verb_audits_files_and_local_benchmarks(tmp_path, capsys):
    rows = [{"prompt": f"Question {i}?", "chosen": "A long answer.", "rejected": "No."} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli.app(["rulers", str(tmp_path / "rows.jsonl")], result_action="return_value")
    assert "longer" in (printed := capsys.readouterr().out) and "100.0 (" in printed and "12 pairs" in printed
    copy = [{**row, "id": i, "subset": "mt-bench-easy"} for i, row in enumerate(rows)]
    (tmp_path / "filtered.json").write_text(json.dumps(copy))
    cli.app(["rulers", str(tmp_path / "filtered.json"), "--benchmark", "rewardbench"], result_action="return_value")
    assert "RewardBench: 12 pairs" in capsys.readouterr().out
