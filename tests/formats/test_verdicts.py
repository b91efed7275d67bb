"""A verdict is read where it can mean one answer only, and several raters share the weight of a row."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrm.data.rows import read_answers, read_row
from vlmrm.errors import RowError
from vlmrm.formats.ratings import by_rater

ANSWERS = {"a": "Eggs.", "b": "Soup."}


def read(ends: str = "_a _b", **row: Any):
    named = {f"response{end}": answer for end, answer in zip(ends.split(), ANSWERS.values(), strict=True)}
    return read_row({"prompt": "What is it?", **named, **row}, "r", lambda reference: reference)


def winner(comparison) -> str:
    (pair,) = comparison.judgement.pairs()
    return "tie" if pair.tie else "ab"[pair.chosen]


@pytest.mark.parametrize(
    ("verdict", "better"),
    [
        *((word, "a") for word in ("A", "Model A", "response_a", "Response A is slightly better", "left", "first")),
        *((word, "b") for word in ("b", "model_b", "assistant B wins", "rightvote", "[[B]]", "Soup.")),
        *((word, "tie") for word in ("Tie", "tie (bothbad)", "both_bad", "same", "equally good", "A=B", "[[A=B]]")),
        *((word, "tie") for word in ("neither", "Neither is better")),
        *((word, "b") for word in ("B>A", "A<<B", "[[B>>A]]")),
    ],
)
def test_words_of_verdicts(verdict, better):
    assert winner(read(winner=verdict)) == better


@pytest.mark.parametrize(
    "verdict",
    [
        *(1, 0.5, True, "1", "", "unsure", "A is not better", "a or b", "neither a nor b"),
        *(["a", None], {"a": 1}, [0.7, 0.3], "A>A"),
    ],
)
def test_a_verdict_that_is_not_sure_is_none(verdict):
    with pytest.raises(RowError, match="row r: "):
        read(winner=verdict)
    assert len(
        read_answers({"prompt": "What?", "response_a": "A", "response_b": "B", "winner": verdict}, "r", str).answers
    )


@pytest.mark.parametrize(
    ("ends", "column", "value", "better"),
    [
        ("_1 _2", "winner", 1, "a"),
        ("_1 _2", "winner", 2.0, "b"),
        ("_1 _2", "preference", "2", "b"),
        ("_0 _1", "choice", 1, "b"),
        ("1 2", "overall_preference", -1, "a"),
        ("1 2", "overall_preference", 3, "b"),
        ("_1 _2", "preference_strength", 0, "tie"),
    ],
)
def test_a_number_names_its_answer_where_certain(ends, column, value, better):
    assert winner(read(ends, **{column: value})) == better


@pytest.mark.parametrize(
    ("ends", "column", "value"),
    [
        ("_1 _2", "winner", 0),
        ("_1 _2", "label", 1),
        ("_0 _1", "preference", 1),
        ("_a _b", "overall_preference", -1),
        ("_1 _2", "preference_strength", -100),
    ],
)
def test_a_number_possibly_a_truth_value_is_refused(ends, column, value):
    with pytest.raises(RowError, match="which does not say whether"):
        read(ends, **{column: value})


def test_unrelated_labels_never_override_a_verdict_or_scores():
    assert winner(read(winner="b", label="food")) == "b"
    assert winner(read(label="food", score_a=1, score_b=2)) == "b"
    with pytest.raises(RowError, match="`winner` and `preference` do not agree"):
        read(winner="b", preference="a", score_a=1, score_b=2)


def test_a_verdict_column_stays_among_the_row_figures():
    columns = read("_1 _2", preference_strength=2, model_1="m", preference_statement="It is.").columns
    assert columns == {"preference_strength": 2, "model_1": "m", "preference_statement": "It is."}


@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_a_prompt_ending_with_an_answer_is_refused(column):
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Eggs."}]
    with pytest.raises(RowError, match="ends with an answer"):
        read_row({column: turns, "chosen": "Eggs.", "rejected": "Soup."}, "r", str)


@pytest.mark.parametrize(
    ("values", "raters"),
    [
        ([3, 1], [[3, 1]]),
        ({"ann": [3, 1], "bob": [2, 2]}, [[3, 1], [2, 2]]),
        ([{"rater": "ann", "scores": [3, 1]}, {"rater": "bob", "scores": [2, 2]}], [[3, 1], [2, 2]]),
        ([[3, 2, 1], [1, 2, 3]], [[3, 1], [2, 2], [1, 3]]),  # a list for each answer
        ([[3, 1], [2, 2], [1, 3]], [[3, 1], [2, 2], [1, 3]]),  # a list for each rater
        ([[3], [1]], [[3, 1]]),
        ([[1, 2], [2, 1]], [[1, 2], [2, 1]]),  # the same either way
    ],
)
def test_ratings_of_several_raters(values, raters):
    assert by_rater(values, "scores", 2) == raters


@pytest.mark.parametrize(
    "values",
    [[[3, 1], [2, 2]], [[3, 1], [2]], {"ann": [3]}, [[], []], [None, 1], [[3, None], [1, 2]], "3 1", [True, False]],
)
def test_ratings_must_be_one_for_each_answer(values):
    with pytest.raises(RowError, match="`scores`"):
        by_rater(values, "scores", 2)


def test_raters_share_the_weight_of_the_row():
    judgements = read(preference=["a", "a", "b", "tie"], weight=2.0, margin=0.5).judgements
    shares = [(judgement.values, judgement.weight, judgement.margin) for judgement in judgements]
    assert shares == [((1.0, 0.0), 1.0, 0.5), ((0.0, 1.0), 0.5, 0.5), ((0.0, 0.0), 0.5, 0.5)]
    assert read(preference=["a", "a", "b"], tie=True).judgements[0].pairs()[0].tie
    (agreed,) = read(preference=["a", "a"]).judgements
    assert agreed.weight == 1.0


def test_dimensions_are_judgements_of_their_own():
    row = {"prompt": "A cat runs.", "path_A": "1.mp4", "path_B": "2.mp4", "VQ": "A", "MQ": "B", "TA": "A"}
    judgements = read_row(row, "r", lambda reference: reference).judgements
    assert [(j.dimension, j.values) for j in judgements] == [("VQ", (1, 0)), ("MQ", (0, 1)), ("TA", (1, 0))]
    columns = read_row({**row, "Overall": "B"}, "r", lambda reference: reference).columns
    assert columns == {"VQ": "A", "MQ": "B", "TA": "A", "Overall": "B"}
