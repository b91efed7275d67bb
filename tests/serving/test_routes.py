"""A conversation has one score as a sample, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from tests.serving.sent_media import data_uri, png
from tests.serving.services import in_loop, running, served
from vlmrm.formats.openai import read_messages
from vlmrm.scoring import load_scorer
from vlmrm.serving.engines import RewardEngine

REWARDS = str(Path(__file__).parents[1] / "rewards")


GREEN = {"type": "image", "image": data_uri(png(84, 56, "green"))}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def turn(role: str, *parts) -> dict:
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}


RED, BLUE = ({"type": "image", "image": data_uri(png(84, 56, colour))} for colour in ("red", "blue"))
DRAWN = [[turn("user", "Draw it."), turn("assistant", one)] for one in (RED, BLUE)]
ABOUT = [[turn("user", one, "Is this an <image>?"), turn("assistant", "Yes.")] for one in (RED, BLUE)]


def test_pictures_are_answers_or_questions_and_groups_get_win_rates(tiny_reward_model):
    settings = {"model_path": str(tiny_reward_model), "dtype": "float32", "device": "cpu"}
    drawn, about = map(load_scorer(tiny_reward_model, dtype="float32", device="cpu").score, (DRAWN, ABOUT))
    assert abs(drawn[0] - drawn[1]) > 1e-4 < abs(about[0] - about[1])
    first = 1 / (1 + np.exp(drawn[1] - drawn[0]))
    names = ("vlm_reward", "vlm_reward_group")
    files = [one["image"].partition(",")[2] for one in (RED, BLUE)]
    bodies = {
        "vlm_reward_group": {"prompt": ["Draw it."] * 2, "image": files},
        "vlm_reward": {"prompt": ["Is this an <image>?"] * 2, "response": ["Yes."] * 2, "image": files},
    }
    with served(*({"reward_type": name, **settings} for name in names)) as url, httpx.Client(timeout=600) as client:
        found = {name: client.post(f"{url}/{name}/compute", json=body).json() for name, body in bodies.items()}
    assert found["vlm_reward_group"] == {"rewards": pytest.approx([first, 1 - first], abs=1e-5)}
    assert found["vlm_reward"] == {"rewards": pytest.approx(about, abs=1e-5)}


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
