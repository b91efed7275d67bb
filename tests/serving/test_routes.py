"""A conversation has one score, whichever route it takes, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from tests.serving.sent_media import data_uri, png
from tests.serving.services import in_loop, running, served
from vlmrm.adapters.rows import text_columns
from vlmrm.formats.openai import read_messages
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer
from vlmrm.serving.engines import RewardEngine

REWARDS = str(Path(__file__).parents[1] / "rewards")


GREEN = {"type": "image", "image": data_uri(png(84, 56, "green"))}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def turn(role: str, *parts) -> dict:
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}


def video(image: dict, **options) -> dict:
    return {"type": "video", "video": [image["image"], GREEN["image"]], **options}


TALK = (("user", "A?"), ("assistant", "B."))
# A conversation about a picture, or with one in its answer. Two pictures must have two scores.
SHAPES = {
    "text alone": lambda it: [turn("user", "Which?"), turn("assistant", f"The {'red' if it == RED else 'blue'} one.")],
    "a picture in question": lambda it: [turn("user", it, "Which?"), turn("assistant", "This.")],
    "a picture as the answer": lambda it: [turn("user", "Draw it."), turn("assistant", it)],
    "an interleaved answer about a picture": lambda it: [turn("user", GREEN, "Edit."), turn("assistant", "So:", it)],
    "a literal placeholder": lambda it: [turn("user", it, "Is this an <image>?"), turn("assistant", "Yes.")],
    "two turns": lambda it: [turn(role, word) for role, word in TALK] + [turn("user", it), turn("assistant", "D")],
    "a system turn": lambda it: [turn("system", "Be brief."), turn("user", it, "Which?"), turn("assistant", "This.")],
    "a video with options": lambda it: [turn("user", "Film it."), turn("assistant", video(it, sample_fps=4.0))],
}
RED, BLUE = ({"type": "image", "image": data_uri(png(84, 56, colour))} for colour in ("red", "blue"))
PAIRS = {name: [shape(RED), shape(BLUE)] for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def settings(tiny_reward_model) -> dict:
    return {"model_path": str(tiny_reward_model), "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def expected(tiny_reward_model) -> dict[str, list[float]]:
    """The scorer's own scores of each pair."""
    scorer = load_scorer(tiny_reward_model, dtype="float32", device="cpu")
    return {name: scorer.score(pair) for name, pair in PAIRS.items()}


@pytest.fixture(scope="module")
def answers(settings) -> dict[str, dict[str, list]]:
    """What two rewards of one service answer about each pair."""
    names = ("vlm_reward", "vlm_reward_group")
    items = [{"messages": one, "group": name} for name, pair in PAIRS.items() for one in pair]
    found = {}
    with served(*({"reward_type": name, **settings} for name in names)) as url, httpx.Client(timeout=600) as client:
        for name in names:
            data = client.post(f"{url}/v1/rewards", json={"model": name, "items": items}).json()["data"]
            found[name] = {shape: [one for one in data if one["group"] == shape] for shape in PAIRS}
        files = [one["image"].partition(",")[2] for one in (RED, BLUE)]
        drawn = client.post(f"{url}/vlm_reward_group/compute", json={"prompt": ["Draw it."] * 2, "image": files})
        found["compute"] = drawn.json()
        asked = {"prompt": ["Is this an <image>?"] * 2, "response": ["Yes."] * 2, "image": files}
        found["placeholder"] = client.post(f"{url}/vlm_reward/compute", json=asked).json()
    return found


def wins(scores: list[float]) -> list[float]:
    first = 1 / (1 + np.exp(scores[1] - scores[0]))
    return [first, 1 - first]


@pytest.fixture(scope="module")
def rewards(settings) -> RewardSet:
    names = ("vlm_reward", "vlm_reward_group")
    return RewardSet([{"name": name, "reward_model": name, **settings} for name in names])


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_has_one_score_on_every_route(expected, answers, rewards, name):
    scores = expected[name]
    assert abs(scores[0] - scores[1]) > 1e-4
    columns = text_columns([one[:-1] for one in PAIRS[name]], [one[-1:] for one in PAIRS[name]], None)
    here = rewards(**columns, groups=[0, 0]).rewards
    for reward, wanted in (("vlm_reward", scores), ("vlm_reward_group", wins(scores))):
        served_ones = answers[reward][name]
        assert [one["error"] for one in served_ones] == [None, None]
        assert [one["raw"] for one in served_ones] == pytest.approx(wanted, abs=1e-5)
        assert here[reward].tolist() == pytest.approx(wanted, abs=1e-5)


def test_flow_factory_clients_get_groupwise_win_rates(expected, answers):
    assert answers["compute"] == {"rewards": pytest.approx(wins(expected["a picture as the answer"]), abs=1e-5)}


def test_compute_takes_placeholders_beside_pictures_as_words(expected, answers):
    assert answers["placeholder"] == {"rewards": pytest.approx(expected["a literal placeholder"], abs=1e-5)}


def engine(name: str) -> RewardEngine:
    return RewardEngine(name="it", reward_model=f"tests.rewards.reward_examples.{name}", device="cpu")


def asked(*answer) -> dict:
    return {"messages": read_messages([turn("user", "Explain."), turn("assistant", *answer)], "user")}


def test_a_text_reward_refuses_pictures_in_answers():
    plain, parted, shown = engine("Spoken")([asked("So."), asked("S", "o."), asked("So", RED)])
    assert plain == parted == {"score": 3.0}
    assert "its answer holds an image, and this reward takes texts as answers" in shown["error"]


def test_a_reward_that_reads_no_answer_refuses_it():
    assert engine("Length")([asked("So.")]) == [{"score": 8.0}]  # it takes any column
    about = [turn("user", GREEN, "Explain."), turn("assistant", "So.")]
    [shown] = engine("Brightness")([{"messages": about}])
    assert "its answer is no image or video alone, and this reward reads no response" in shown["error"]


def boastful(**settings):
    common = {"reward_type": "reward_examples.Boastful", "import_from": [REWARDS], "device": "cpu"}
    return {**common, "name": "boastful", **settings}


@in_loop
async def test_extra_information_never_overrides_score_or_error():
    async with running(boastful()) as (_, client):
        native = (await client.post("/v1/rewards", json={"items": [{"prompt": "a"}]})).json()["data"][0]
        theirs = (await client.post("/compute", json={"prompt": ["a"]})).json()
    assert (native["score"], native["raw"], native["error"]) == (1.0, 1.0, None)
    assert native["details"]["score"] == 99.0 and native["details"]["error"] == "none"
    assert theirs == {"rewards": [1.0]}


@in_loop
async def test_columns_beside_item_messages_are_not_dropped():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    items = [{"messages": messages, "response": "c"}, {"messages": messages, "group": 1, "id": "x"}]
    async with running(boastful()) as (_, client):
        mixed, alone = (await client.post("/v1/rewards", json={"items": items})).json()["data"]
    assert mixed["score"] is None and "has messages and response, which would not be read" in mixed["error"]
    assert "would not be read" not in (alone["error"] or "")
