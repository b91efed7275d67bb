"""Every source format becomes the comparison that its author meant."""

import io
import math

import pytest
from PIL import Image

from vlmrm.conversation import Message, Text, Video
from vlmrm.data.rows import read_answers, read_row
from vlmrm.errors import DataError, RowError, UnreadColumnError
from vlmrm.formats import detect_layout


def read(**row):
    return read_row(row, "rows.jsonl:1", lambda reference: reference)


def texts(messages):
    """`role: parts` with media in brackets."""
    return [
        f"{m.role}: " + "".join(p.text if isinstance(p, Text) else f"[{p.reference}]" for p in m.content)
        for m in messages
    ]


def flat(comparison):
    return texts(comparison.prompt), [
        (texts(a), r) for a, r in zip(comparison.answers, comparison.ratings, strict=True)
    ]


ANSWERS = [(["assistant: good"], 1.0), (["assistant: bad"], 0.0)]
USER = {"role": "user", "content": "Look."}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PHOTO_ROWS = {
    "simple": {"prompt": "Look.", "chosen": "good", "rejected": "bad", "image": "a.png"},
    "text answers": {"prompt": [USER], "chosen": "good", "rejected": "bad", "images": ["a.png"]},
    "implicit prompt and its text": {
        **{"prompt": "Look.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        **{"messages": [USER, GOOD], "images": ["a.png"]},
    },
    "hh": {
        "chosen": "\n\nHuman: Look.\n\nAssistant: good",
        "rejected": "\n\nHuman: Look.\n\nAssistant: bad",
        "images": ["a.png"],
    },
    "messages before the answers": {"messages": [USER], "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
    "question": {"question": "Look.", "chosen": "good", "rejected": "bad", "image": "a.png"},
    "swift, response": {"messages": [USER, GOOD], "rejected_response": "bad", "images": ["a.png"]},
    "ranked": {"prompt": "Look.", "responses": ["good", "bad"], "scores": [1, 0], "images": ["a.png"]},
}


@pytest.mark.parametrize("name", PHOTO_ROWS)
def test_spellings_of_two_answers_about_a_photo(name):
    assert flat(read(**PHOTO_ROWS[name])) == (["user: [a.png]Look."], ANSWERS)


IMAGE_ROWS = {
    "text-to-image": {"prompt": "A cat.", "chosen_image": "a.png", "rejected_image": "b.png"},
    "ranked": {"prompt": "A cat.", "response_images": ["a.png", "b.png"], "scores": [1.0, 0.0]},
}


@pytest.mark.parametrize(
    ("name", "texts", "unread"),
    [
        ("text-to-image", {"chosen": "A fluffy one.", "rejected": "No."}, "chosen"),
        ("text-to-image", {"chosen": [GOOD], "rejected": [BAD]}, "chosen"),
        ("ranked", {"responses": ["A fluffy one.", "No."]}, "responses"),
    ],
)
def test_texts_beside_images_that_answer_are_not_dropped(name, texts, unread):
    with pytest.raises(UnreadColumnError, match=rf"`{unread}` holds a text"):
        read(**IMAGE_ROWS[name], **texts)


def test_answers_that_are_images_are_read():
    """Image preferences are published so: as paths, or as the images of other columns."""
    for value in ("a.png", {"bytes": b"\x89PNG...", "path": None}):
        assert read(
            prompt="A cat.", chosen_image=value, rejected_image="b.png", chosen="a.png", rejected="b.png"
        ).pairs()
    images = [(["assistant: [a.png]"], 1.0), (["assistant: [b.png]"], 0.0)]
    for texts in ({"chosen": 1, "rejected": 0}, {"chosen": "A cat.", "rejected": "A cat."}):
        assert flat(read(**IMAGE_ROWS["text-to-image"], **texts)) == (["user: A cat."], images)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_image_bytes_are_recognised_by_their_head(kind):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    with pytest.raises(UnreadColumnError, match="`blob` holds an image or video"):
        read(chosen="good", rejected="bad", blob=file.getvalue())


def test_simple_rows_without_a_prompt():
    assert flat(read(chosen="good", rejected="bad", images=["a.png", "b.png"])) == (["user: [a.png][b.png]"], ANSWERS)
    assert flat(read(chosen="good", rejected="bad")) == ([], ANSWERS)


@pytest.mark.parametrize(
    "labels", [{"label_0": 0, "has_label": False}, {"label_0": 0.0, "label_1": 0.0}, {"label_0": 1, "label_1": 1}]
)
def test_pick_a_pic_without_judgement_is_no_preference(labels):
    row = {"caption": "A cat.", "jpg_0": "a.png", "jpg_1": "b.png"}
    with pytest.raises(RowError, match=r"(nobody compared the images|do not add up to 1): remove the row"):
        read(**row, **labels)
    assert len(read_answers({**row, **labels}, "r", lambda reference: reference).answers) == 2  # to be scored
    assert read(**row, label_0=0, label_1=1, has_label=True).pairs()[0].chosen == 1


def test_hh_turns_become_messages_with_a_common_prompt():
    start = "\n\nHuman: Hello\n\nAssistant: Hi: you?\n\nHuman: Two\n\nlines"
    prompt, branches = flat(read(chosen=f"{start}\n\nAssistant: good", rejected=f"{start}\n\nAssistant: bad\n"))
    assert prompt == ["user: Hello", "assistant: Hi: you?", "user: Two\n\nlines"] and branches == ANSWERS
    differing = f"{start.replace('Hi: you?', 'Yes?')}\n\nAssistant: bad"
    prompt, branches = flat(read(chosen=f"{start}\n\nAssistant: good", rejected=differing))
    assert prompt == ["user: Hello"]
    assert branches[1][0] == ["assistant: Yes?", "user: Two\n\nlines", "assistant: bad"]
    plain = "Human: is how he calls himself."
    assert flat(read(prompt="Look.", chosen=plain, rejected="bad"))[1][0] == ([f"assistant: {plain}"], 1.0)


def test_implicit_prompt_of_several_turns_and_videos():
    first = [USER, {"role": "assistant", "content": "Seen."}, {"role": "user", "content": "And now?"}]
    prompt, branches = flat(read(chosen=[*first, GOOD], rejected=[*first, BAD], videos=["v.mp4"]))
    assert prompt == ["user: [v.mp4]Look.", "assistant: Seen.", "user: And now?"] and branches == ANSWERS


def test_optional_columns():
    comparison = read(
        chosen="good", rejected="bad", margin=0.5, weight=2, tie=True, category=3, id=7, votes=4, x=None, other=[1]
    )
    assert (comparison.id, comparison.category) == ("7", "3")
    assert (comparison.judgement.margin, comparison.judgement.weight) == (0.5, 2.0)
    assert comparison.pairs()[0].tie and comparison.columns == {"votes": 4}
    assert read(chosen="good", rejected="bad").id == "rows.jsonl:1"


def test_a_judgement_may_be_of_some_answers():
    row = {"prompt": "Rank.", "responses": ["a", "b", "b"], "scores": [2, 1, 0]}
    of_pairs = [{"answers": [0, 1], "values": [1, 0]}, {"answers": [2, 0], "values": [0, 1]}]
    assert read_row({**row, "judgements": of_pairs}, "r", str).pairs() == [(0, 1, False), (0, 2, False)]
    for judgements, reason in (
        ([*of_pairs, {"answers": [1, 2], "values": [1, 0]}], "the same answer is listed twice"),
        ([{"answers": [0, 7], "values": [1, 0]}], "there are 3"),
        ([*of_pairs, {"answers": [0], "values": [1]}], "one answer"),
        ([], "`judgements` is empty"),
    ):
        with pytest.raises(RowError, match=reason):
            read_row({**row, "judgements": judgements}, "r", str)


def test_cells_that_are_none_are_absent():
    row = dict(PHOTO_ROWS["simple"], chosen_image=None, rejected_image=None, messages=None, scores=None, margin=None)
    assert flat(read(**row)) == (["user: [a.png]Look."], ANSWERS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": " good\n"}, "the same"),
        ({"rejected": " "}, "answer 2 is empty"),
        ({"chosen": 3}, "expected a text"),
        ({"margin": "big"}, "margin"),
        ({"chosen": "img/a.jpg", "rejected": "img/b.jpg"}, "--columns chosen_image=chosen"),
        ({"chosen": "img/a.mp4", "rejected": "img/b.mp4"}, "video part"),
        ({"margin": 57}, "--columns ignore=margin"),
        ({"weight": -1}, "at least 0"),
        ({"rejected": None}, "also needs `rejected`"),
        ({"prompt": "<image><image> Which?", "images": ["a.png"]}, "more images"),
        ({"images": [{"bytes": None, "path": None}]}, "empty image part"),
        ({"chosen": {**GOOD, "tool_calls": [{"id": "call-1"}]}}, "`tool_calls`"),
        ({"prompt": [{"content": [{"video": "a.mp4", "fps": 0}]}]}, "fps of a video is 0"),
        ({"chosen": "\n\nHuman: Look.\n\nAssistant: good"}, "one of `chosen` and `rejected` is a whole"),
        ({"rejected": "\n\nHuman: Look.\n\nAssistant:"}, "`rejected` ends without an answer"),
        ({"chosen": [USER, GOOD]}, "one of `chosen` and `rejected` is a whole"),
        ({"prompt": "Other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "the row's `prompt`"),
    ],
)
def test_a_bad_row_is_named_and_explained(change, reason):
    with pytest.raises(RowError, match=reason) as caught:
        read(**{"id": "r1", "prompt": "Look.", "chosen": "good", "rejected": "bad", **change})
    assert caught.value.row_id == "r1" and "row r1" in str(caught.value)


@pytest.mark.parametrize("media", [{}, {"images": []}, {"videos": ["a.mp4"]}])
def test_a_placeholder_without_its_media_is_text(media):
    row = read(prompt="What does <image> mean in HTML?", chosen="A picture.", rejected="No idea.", **media)
    videos = [Video("a.mp4")] if "videos" in media else []
    assert row.prompt == (Message.of("user", *videos, "What does <image> mean in HTML?"),)


@pytest.mark.parametrize(
    ("answers", "scores", "reason"),
    [
        (["a"], [1], "learns from pairs"),
        (["a", "b"], [1], "2 answers"),
        (["a", "b"], [1, math.nan], "finite"),
        (["a", "b"], [1, "2"], "write a number"),
        (["a", "a", "b"], [1, 2, 3], "twice"),
        (["a", "a"], [1, 1], "the same"),
    ],
)
def test_bad_ranked_lists(answers, scores, reason):
    with pytest.raises(RowError, match=reason):
        read(prompt="p", responses=answers, scores=scores)


def test_an_unknown_layout_names_columns_the_nearest_needs():
    for columns, said in (
        (["prompt", "better", "rejected"], "`chosen / rejected`.*`chosen`"),
        (["prompt", "chosen_image"], "`text-to-image`, which also needs `rejected_image`"),
        (["messages"], "ms-swift.*`rejected_images` or `rejected_messages`"),
    ):
        with pytest.raises(DataError, match=said):
            detect_layout(columns)


@pytest.mark.parametrize(("name", "value", "meant"), [("promt", "What?", "prompt"), ("margn", 3.0, "margin")])
def test_a_nearly_matching_column_name_is_refused(name, value, meant):
    with pytest.raises(RowError, match=f"`{name}` is not read: .* --columns {meant}={name}"):
        read(chosen="Yes.", rejected="No.", **{name: value})
