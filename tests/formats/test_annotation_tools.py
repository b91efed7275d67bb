"""What an export of an annotation tool leaves open is no preference."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrm.data.rows import read_row
from vlmrm.errors import RowError


def label_studio(*results: list[dict[str, Any]], **data: str):
    fields = data or {"prompt": "What?", "answer1": "Eggs.", "answer2": "Soup."}
    return {"data": fields, "annotations": [{"result": result} for result in results]}


def pairwise(selected: str | None, tags: str = "answer1,answer2", control: str = "pw") -> dict[str, Any]:
    return {"type": "pairwise", "from_name": control, "to_name": tags, "value": {"selected": selected}}


def rating(number: Any, tag: str, control: str = "stars") -> dict[str, Any]:
    return {"type": "rating", "from_name": control, "to_name": tag, "value": {"rating": number}}


REFUSED = {
    "nobody has judged": (label_studio([]), "nobody has judged"),
    "nothing selected": (label_studio([pairwise(None)]), "`selected` is None"),
    "two that differ": (label_studio([pairwise("left"), pairwise("right", control="safety")]), "2 pairwise results"),
    "tags of no field": (label_studio([pairwise("left", "x,y")]), "it compares x and y"),
    "tags that are turned": (label_studio([pairwise("left", "txt-2,txt-1")]), "it compares txt-2 and txt-1"),
    "one rating": (label_studio([rating(4, "answer1")]), "its ratings"),
    "a rating that is none": (label_studio([rating(4, "answer1"), rating(None, "answer2")]), "write a number"),
    "no two answers": (label_studio([pairwise("left", "x,y")], prompt="What?", text="Eggs."), "no two answers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sure_is_refused(name):
    row, reason = REFUSED[name]
    with pytest.raises(RowError, match=reason):
        read_row(row, "r", str)


def test_raters_that_agree_are_one_judgement():
    agreed = label_studio([pairwise("left"), pairwise("left", control="safety")])
    assert read_row(agreed, "r", str).ratings == (1.0, 0.0)
