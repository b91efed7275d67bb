"""The types of the domain refuse what they cannot be when they are made, and cannot be changed afterwards."""

from __future__ import annotations

import dataclasses
import doctest
import math
import re

import pytest

from vlmrm import conversation
from vlmrm.conversation import (
    Comparison,
    Conversation,
    Image,
    Judgement,
    Message,
    Outcome,
    Text,
    Video,
    VideoOptions,
    media_of,
    text_of,
)
from vlmrm.errors import MediaError, RowError

ASKED = Message.of("user", Image("a.png"), "Which ", "one?")
SAID = Message.of("assistant", "This.")
TWO = ((SAID,), (Message.of("assistant", "That."),))


def test_the_examples_in_its_docstrings_are_true():
    result = doctest.testmod(conversation)
    assert result.failed == 0 and result.attempted >= 12


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: Text(3), RowError, "must be a text, got 3"),
        (lambda: Text("half \ud83d"), RowError, "'\\ud83d', half of a character"),
        (lambda: Image(3), MediaError, "3 is no reference to an image"),
        (lambda: Video(("a.png", "b.png"), VideoOptions(max_frames=2)), MediaError, "max_frames of a video"),
        (lambda: Message("", ()), RowError, "role of a message must be a text"),
        (lambda: Message("user", "Hello"), RowError, "a user message holds 'H'"),
        (lambda: Message.of("usr", "?"), RowError, "did you mean user?"),
        (lambda: Message.of("gpt", "?"), RowError, "gpt is called assistant here"),
        (lambda: Conversation(()), RowError, "no message"),
        (lambda: Conversation([Message.of("user", Image())]), RowError, "empty image part"),
        (lambda: Conversation([ASKED]).answer, RowError, "there is no answer"),
        (lambda: Judgement((0, 1), (1,)), RowError, "1 values judge the answers [0, 1]"),
        (lambda: Judgement((0, 1), (1, math.nan)), RowError, "the score of answer 2 is nan"),
        (lambda: Comparison("r", (ASKED,), TWO, (Judgement((0, 2), (1, 0)),)), RowError, "answers [0, 2] are judged"),
        (lambda: Comparison("r", (ASKED,), TWO).judgement, RowError, "not judged"),
        (lambda: Outcome(), RowError, "a score or an error"),
    ],
)
def test_nonsense_is_refused_when_it_is_made(make, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        make()
    assert type(caught.value) is error


@pytest.mark.parametrize("value", [0, -1, True, "2", math.nan, math.inf, [1]])
@pytest.mark.parametrize("name", [option.name for option in dataclasses.fields(VideoOptions)])
def test_a_video_option_is_a_number_above_zero(name, value):
    if (name, value) == ("video_start", 0) and value is not False:
        assert VideoOptions(video_start=0).as_dict() == {"video_start": 0}
        return
    with pytest.raises(MediaError, match=f"{name} of a video is .*: give a number above 0"):
        VideoOptions(**{name: value})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"resized_width": 56}, "resized_height and resized_width of a video go together"),
        ({"min_pixels": 3e5, "max_pixels": 2e5}, "200000.0, below its min_pixels of 300000"),
        ({"max_pixels": 50000}, "50000, below its min_pixels of 100352"),
    ],
)
def test_contradictory_video_options_are_refused(options, sentence):
    with pytest.raises(MediaError, match=re.escape(sentence)):
        VideoOptions(**options)
    size = {"resized_height": 56, "resized_width": 56}  # which is then its size, whatever the limits
    assert VideoOptions(**{**options, **size}).as_dict() == {**options, **size}


def test_texts_and_media_are_in_reading_order():
    clip = Video(["b.png", "c.png"])
    talk = [ASKED, Message.of("assistant", clip, "Here.")]
    assert text_of(talk) == "Which one?\nHere." and media_of(talk) == [Image("a.png"), clip]
    assert clip.reference == ("b.png", "c.png")


def test_several_judgements_make_the_pairs_of_each():
    answers = (*TWO, (Message.of("assistant", "None."),))
    judgements = Judgement((2, 0), (1.0, 3.0), rater="a"), Judgement((0, 1, 2), (1.0, 2.0, 1.0), "rating", rater="b")
    both = Comparison("r", (ASKED,), answers, judgements)
    assert both.pairs() == [(0, 2, False), (1, 0, False), (0, 2, True), (1, 2, False)]
    assert both.agreed() == [(0, 2, False), (1, 0, False), (1, 2, False)] and both.ratings == (2.0, 2.0, 1.0)
    with pytest.raises(RowError, match="answer 2 is in none of its judgements"):
        dataclasses.replace(both, judgements=judgements[:1])
    turned = dataclasses.replace(both, judgements=(Judgement((2, 0, 1), (1.0, 2.0, 3.0)),))
    assert turned.ratings == (2.0, 3.0, 1.0)


def test_several_raters_are_judged_by_their_weighted_mean():
    first, second = Judgement((0, 1), (1.0, 0.0), weight=2.0), Judgement((1, 0), (1.0, 0.0), weight=1.0)
    several = Comparison("r", (ASKED,), TWO, (first, second))
    assert several.ratings == pytest.approx((2 / 3, 1 / 3)) and several.judgement.weight == 3.0
    assert several.agreed() == [(0, 1, False)]
    thirds = [Judgement((0, 1), values, "rating", 0.5, 0.1) for values in ((1.0, 2.0), (2.0, 3.0), (3.0, 1.0))]
    tied = Comparison("r", (ASKED,), TWO, tuple(thirds)).judgement
    assert tied.pairs() == [(0, 1, True)] and (tied.kind, tied.margin) == ("rating", 0.5)


def test_answers_that_nobody_compares_are_no_pair():
    answers = (*TWO, (Message.of("assistant", "None."),))
    chain = Comparison("r", (ASKED,), answers, (Judgement((0, 1), (1.0, 0.0)), Judgement((2, 1), (0.0, 1.0))))
    assert chain.agreed() == chain.pairs() == [(0, 1, False), (1, 2, False)]


def test_a_comparison_without_judgements_can_be_scored():
    comparison = Comparison("r", (ASKED,), TWO)
    assert comparison.pairs() == [] and comparison.is_pair()
    assert [talk.answer.text for talk in comparison.conversations()] == ["This.", "That."]
    assert comparison.conversations()[0].prompt == (ASKED,)
