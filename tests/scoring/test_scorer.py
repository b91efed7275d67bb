"""Scores: in request order, the same in any company, and from any way of giving an image."""

from __future__ import annotations

import base64
import io
import json
import random

import pytest
import torch
from PIL import Image

from vlmrm import cli, load_scorer
from vlmrm.errors import ConfigError, MediaError, RowError
from vlmrm.modeling import checkpoint_digest, write_complete
from vlmrm.modeling.tiny import make_tiny_reward_model

QUESTION = "Which colour is this?"


@pytest.fixture(scope="module")
def scorer(tiny_reward_model):
    return load_scorer(tiny_reward_model)


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (84, 56), "red").save(path)
    return path


def conversation(answer: str, *images, question: str = QUESTION) -> list[dict]:
    parts = [{"type": "image", "image": image} for image in images]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
        {"role": "assistant", "content": answer},
    ]


def mixed() -> list[list[dict]]:
    """Short and long, with no image, one and two, in no order."""
    red, wide = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (140, 56), "blue")
    return [
        conversation("red", red),
        conversation("It is blue, or so it seems to me, on a second look at it. " * 3, wide),
        conversation("no picture"),
        conversation("two", red, wide),
        conversation("red", red, question="What?"),
        conversation("a " * 60),
    ]


def library_score(model_folder, messages) -> float:
    """One conversation by transformers alone."""
    from transformers import AutoModelForSequenceClassification, AutoProcessor

    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    answer = {"role": "assistant", "content": [{"type": "text", "text": messages[-1]["content"]}]}
    inputs = processor.apply_chat_template(
        [[*messages[:-1], answer]], tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model(**inputs).logits.item()


def test_scores_are_the_library_s_in_request_order(scorer, tiny_reward_model):
    expected = [library_score(tiny_reward_model, messages) for messages in mixed()]
    assert scorer.score(mixed()) == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == len(expected)


def test_a_score_does_not_depend_on_its_company(scorer):
    alone = [scorer.score([messages])[0] for messages in mixed()]
    order = list(range(len(alone)))
    for seed in range(4):
        random.Random(seed).shuffle(order)
        together = scorer.score([mixed()[i] for i in order])
        assert together == pytest.approx([alone[i] for i in order], abs=1e-5)


def test_scores_are_without_dropout(tmp_path):
    folder = make_tiny_reward_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    write_complete(folder, world_size=1, step=0)
    scorer = load_scorer(folder)
    assert scorer.score(mixed()) == pytest.approx(scorer.score(mixed()), abs=1e-6)


def test_the_batch_budget_changes_memory_and_not_scores(tiny_reward_model, scorer):
    expected = scorer.score(mixed())
    for budget in (1, 200, 10**6):
        bounded = load_scorer(tiny_reward_model, max_tokens_per_batch=budget)
        assert bounded.score(mixed()) == pytest.approx(expected, abs=1e-5)


def test_an_image_scores_alike_in_every_form(scorer, picture):
    content = picture.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    bitmap = io.BytesIO()
    Image.open(picture).save(bitmap, "BMP")
    ways = [Image.open(picture), str(picture), picture, content, uri, f"file://{picture}", bitmap.getvalue()]
    scores = scorer.score([conversation("red", way) for way in ways])
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
    scores += scorer.score([[{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]])
    assert scores == pytest.approx([scores[0]] * len(scores), abs=1e-6)


def test_groups_score_as_their_conversations(scorer, picture):
    image, other = Image.open(picture), Image.new("RGB", (56, 84), "green")
    prompt = conversation("", image)[:1]
    drawing = [{"role": "assistant", "content": [{"type": "image", "image": other}]}]
    answers = ["red", "blue", "a long answer about the colour red"]
    scores = scorer.score_groups([(prompt, answers), ("Draw it.", [drawing]), (prompt, [])])
    assert [len(group) for group in scores] == [3, 1, 0]
    drawn = [{"role": "user", "content": "Draw it."}, *drawing]
    flat = scorer.score([*(conversation(text, image) for text in answers), drawn])
    assert [value for group in scores for value in group] == pytest.approx(flat, abs=1e-5)


GOOD = conversation("red")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda it: it.score([GOOD, GOOD[:1]]), RowError, r"^conversation 1: .*no answer"),
        (lambda it: it.score([GOOD, GOOD, []]), RowError, r"^conversation 2: "),
        (lambda it: it.score([[{"role": "user", "content": 3}]]), RowError, r"^conversation 0: .*content of a user"),
        (lambda it: it.score([GOOD, conversation("red", __file__)]), MediaError, r"^conversation 1: .*not an image"),
        (lambda it: it.score(GOOD), RowError, "conversation 0: it is a single dict"),
        (lambda it: it.score_groups(("Red?", ["Yes."])), RowError, r"group 0: it is no pair"),
        (lambda it: it.score_groups([("Red?", ["Yes."]), ("Red?", "No.")]), RowError, "group 1: its candidates are a"),
        (lambda it: it.score_groups([("Red?", [None])]), RowError, "group 0: expected a text or a list of messages"),
    ],
)
def test_unscorable_input_is_named_by_its_place(scorer, call, error, said):
    with pytest.raises(error, match=said):
        call(scorer)


def test_a_nonfinite_score_is_an_error(tiny_reward_model):
    broken = load_scorer(tiny_reward_model, device="cpu")
    for weight in broken.model.parameters():
        weight.data.fill_(float("nan"))
    with pytest.raises(RowError, match="conversation 0: its score is nan: look for broken weights, or compute"):
        broken.score([conversation("red")])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8': choose from auto, bfloat16"),
        ({"check_sight": "false"}, "check_sight is 'false': write true or false"),
        ({"device": "cuda:99"}, "device is cuda:99, which this machine does not have"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny_reward_model, option, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(tiny_reward_model, **option)


@pytest.fixture
def vlmrm(capsys):
    """`vlmrm(*words)` runs the command line in this process and returns what it printed."""

    def run(*arguments) -> str:
        cli.app([*map(str, arguments)], exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    return run


def test_the_command_line_scores_like_the_scorer(vlmrm, scorer, tiny_reward_model, picture):
    answers = ["red", "A blue one."]
    expected = scorer.score([conversation(answer, picture) for answer in answers])
    asked = ["score", "--model", tiny_reward_model, "--image", picture, "--prompt", QUESTION]
    asked += [word for answer in answers for word in ("--response", answer)]

    found = json.loads(vlmrm(*asked, "--json"))
    assert [line["answer"] for line in found["answers"]] == answers
    assert [line["score"] for line in found["answers"]] == pytest.approx(expected, abs=1e-5)
    assert {line["digest"] for line in found["answers"]} == {scorer.digest} == {checkpoint_digest(tiny_reward_model)}

    lines = vlmrm(*asked).splitlines()
    assert [float(line.split()[0]) for line in lines] == pytest.approx(expected, abs=1e-4)
    best = lines[expected.index(max(expected))]
    assert [line for line in lines if line.endswith("<- best")] == [best]


def test_a_conversation_over_the_token_limit_is_refused(scorer):
    limit = scorer.engine.collator.max_seq_length
    [good, long] = scorer.score_each(
        [
            [{"role": "user", "content": "a " * times}, {"role": "assistant", "content": "b"}]
            for times in (1, 2 * limit)
        ]
    )
    assert isinstance(good, float)
    assert isinstance(long, RowError) and f"tokens are over max_seq_length {limit}" in long.reason
