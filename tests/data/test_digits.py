"""The demo's comparisons are balanced: without the pictures nothing can be learned from them."""

import json
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversations import references

from vlmrm.commands.demo import print_summary
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.digits import write_digits
from vlmrm.data.media import open_image


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def comparisons(files):
    return {
        name: load_comparisons([str(path)], arguments=DataArguments())[:]["comparison"] for name, path in files.items()
    }


def content(answer) -> str:
    return text_of(answer) + "".join(references(answer))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("kind", ["answers", "images", "ranked"])
def test_any_two_answers_beat_each_other_equally_often(split, kind, comparisons):
    wins = Counter()
    for comparison in comparisons[f"{split}_{kind}"]:
        # Images are judged under their prompt's text, so there the pictures must balance; elsewhere the texts.
        for pair in comparison.pairs():
            if not pair.tie:
                wins[content(comparison.answers[pair.chosen]), content(comparison.answers[pair.rejected])] += 1
    assert wins and all(count == wins[loser, winner] for (winner, loser), count in list(wins.items()))


def test_splits_share_no_picture_and_no_prompt(comparisons):
    def images(split):
        return {
            reference
            for name, rows in comparisons.items()
            if name.startswith(split)
            for row in rows
            for conversation in row.conversations()
            for reference in references(conversation.messages)
        }

    def prompts(split):
        rows = [row for name, rows in comparisons.items() if name.startswith(split) for row in rows]
        return {text_of(row.prompt) + "".join(references(row.prompt)) for row in rows}

    assert not prompts("train") & prompts("eval")
    train, held_out = images("train"), images("eval")
    assert not train & held_out and len(train) > 1400 and len(held_out) > 350
    assert open_image(next(iter(train))).size == (56, 56)


def test_kinds_are_named_and_lists_hold_one_tie(comparisons):
    assert {name: {row.category for row in rows} for name, rows in comparisons.items()} == {
        name: {name.split("_")[1]} for name in comparisons
    }
    assert all(sum(pair.tie for pair in row.pairs()) == 1 for row in comparisons["eval_ranked"])
    assert {name: len(rows) for name, rows in comparisons.items() if name.startswith("eval")} == {
        "eval_answers": 358,
        "eval_images": 358,
        "eval_ranked": 120,
    }


def test_right_answers_name_the_digit_of_the_picture(files):
    from sklearn.datasets import load_digits

    from vlmrm.data.digits import WORDS

    _, labels = load_digits(return_X_y=True)
    for line in files["train_answers"].read_text().splitlines():
        row = json.loads(line)
        assert row["chosen"] == f"It is {WORDS[labels[int(row['image'][7:11])]]}."


def test_the_same_seed_writes_the_same_files(files, tmp_path):
    again = write_digits(tmp_path)
    assert [path.read_bytes() for path in again.values()] == [path.read_bytes() for path in files.values()]
    reseeded = write_digits(tmp_path / "other", seed=1)
    assert reseeded["train_answers"].read_bytes() != files["train_answers"].read_bytes()


def test_the_demo_ends_with_its_own_answers_to_score(capsys):
    summary = {
        **{"train_seconds": 32.0, "sample_count": 2516, "blank_image_accuracy": 0.5, "best_checkpoint": "best"},
        "accuracy_without_luck": {"value": 0.9752, "low": 0.95, "high": 0.99},
        "scores": {"image": "four.png", "prompt": "Which?", "It is four.": 2.5, "It is nine.": -2.5},
    }
    print_summary(Path("demo"), SimpleNamespace(csv="results.csv"), summary, Path("report.html"))
    printed = capsys.readouterr().out
    assert "97.5% right" in printed and "grey, 50.0%" in " ".join(printed.split())
    words = shlex.split(printed.partition("Next:")[2])
    assert [word for word in words if word.startswith("It is")] == ["It is four.", "It is nine."]
