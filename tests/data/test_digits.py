"""The demo's comparisons are balanced: without the pictures nothing can be learned from them."""

import json
from collections import Counter

import pytest

from tests.conversations import references
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
    def images_and_prompts(split):
        rows = [row for name, rows in comparisons.items() if name.startswith(split) for row in rows]
        talks = [talk.messages for row in rows for talk in row.conversations()]
        prompts = {content(row.prompt) for row in rows}
        return {reference for talk in talks for reference in references(talk)}, prompts

    (train, asked), (held_out, asked_later) = map(images_and_prompts, ("train", "eval"))
    assert not asked & asked_later
    assert not train & held_out and len(train) > 1400 and len(held_out) > 350
    assert open_image(next(iter(train))).size == (56, 56)


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
