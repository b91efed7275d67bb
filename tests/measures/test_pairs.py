"""What is read from the frame of scored pairs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conversations import rated
from tests.pair_frames import list_frame, pair_frame
from vlmrm.conversation import Comparison, Image, Judgement, Message, Text
from vlmrm.errors import DataError
from vlmrm.measures.pairs import candidates_of, check_pairs, pair_table, scored_pairs


def test_every_branch_of_a_list_is_taken_once():
    scores, ratings = [[0.3, 0.1, 0.2], [5.0, 4.0], [1.0, 2.0, 3.0, 4.0]], [[1, 2, 2], [1, 0], [4, 3, 2, 2]]
    found = candidates_of(list_frame(scores, ratings))
    for number in range(3):
        place = found.groups == number
        rows = sorted(zip(found.scores[place], found.ratings[place], strict=True))
        assert rows == sorted(zip(scores[number], ratings[number], strict=True))


@pytest.mark.parametrize(("cluster_by", "clusters"), [(None, 2), ("prompt", 3), ("user", 1)])
def test_questions_about_one_image_are_one_cluster(cluster_by: str | None, clusters: int):
    """Ten questions about each of a hundred images had intervals that held in 67 %."""
    asked = [("a.png", "How many?"), ("a.png", "Which colour?"), ("b.png", "How many?")]
    turns = [Message("user", (Image(path), Text(question))) for path, question in asked]
    rows = [rated(str(i), [turn], [[], []], [1, 0], columns={"user": "u"}) for i, turn in enumerate(turns)]
    frame = pair_table(rows, cluster_by=cluster_by).frame
    assert frame["cluster"].nunique() == clusters


def test_several_raters_of_a_pair_are_averaged():
    raters = [Judgement((0, 1), (1, 0), weight=0.25), Judgement((0, 1), (0, 1), weight=0.75)]
    comparison = Comparison("r", (), ((Message.of("assistant", "A"),), (Message.of("assistant", "B"),)), raters)
    frame = scored_pairs([comparison], [[0.5, 1.5]])
    row = frame[["chosen_branch", "chosen_rating", "chosen_score", "weight", "tie"]].to_dict("records")
    assert row == [{"chosen_branch": 1, "chosen_rating": 0.75, "chosen_score": 1.5, "weight": 1.0, "tie": False}]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pair_frame([1.0, np.nan, 2.0]), "comparison row1"),
        (pair_frame([]), "no scored pairs"),
        (pair_frame([1.0]).drop(columns="cluster"), "no column cluster"),
        (pair_frame([1.0, 2.0], checkpoint=["a", "b"]), "of 2 checkpoints"),
    ],
)
def test_what_has_no_figures_is_refused(frame, message):
    with pytest.raises(DataError, match=message):
        check_pairs(frame)
