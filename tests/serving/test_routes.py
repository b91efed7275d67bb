"""What a reward cannot read is refused by name, and what it says beside a score is not the score."""

from __future__ import annotations

from pathlib import Path

from tests.serving.sent_media import data_uri, png
from tests.serving.services import in_loop, running
from vlmrm.formats.openai import read_messages
from vlmrm.serving.engines import RewardEngine

REWARDS = str(Path(__file__).parents[1] / "rewards")


RED, GREEN = ({"type": "image", "image": data_uri(png(84, 56, colour))} for colour in ("red", "green"))


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def turn(role: str, *parts) -> dict:
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}


def engine(name: str) -> RewardEngine:
    return RewardEngine(name="it", reward_model=f"tests.rewards.reward_examples.{name}", device="cpu")


def asked(*answer) -> dict:
    return {"messages": read_messages([turn("user", "Explain."), turn("assistant", *answer)], "user")}


def test_a_reward_of_texts_refuses_the_pictures_of_an_answer_by_name():
    plain, parted, shown = engine("Spoken")([asked("So."), asked("S", "o."), asked("So", RED)])
    assert plain == parted == {"score": 3.0}
    assert "its answer holds an image, and this reward takes texts as answers" in shown["error"]


def test_a_reward_that_reads_no_answer_refuses_it_by_name():
    assert engine("Length")([asked("So.")]) == [{"score": 8.0}]  # it takes any column
    about = [turn("user", GREEN, "Explain."), turn("assistant", "So.")]
    [shown] = engine("Brightness")([{"messages": about}])
    assert "its answer is no image or video alone, and this reward reads no response" in shown["error"]


def boastful(**settings):
    common = {"reward_type": "reward_examples.Boastful", "import_from": [REWARDS], "device": "cpu"}
    return {**common, "name": "boastful", **settings}


@in_loop
async def test_extra_information_is_neither_the_score_nor_the_error():
    async with running(boastful()) as (_, client):
        native = (await client.post("/v1/rewards", json={"items": [{"prompt": "a"}]})).json()["data"][0]
        theirs = (await client.post("/compute", json={"prompt": ["a"]})).json()
    assert (native["score"], native["raw"], native["error"]) == (1.0, 1.0, None)
    assert native["details"]["score"] == 99.0 and native["details"]["error"] == "none"
    assert theirs == {"rewards": [1.0]}


@in_loop
async def test_columns_beside_the_messages_of_an_item_are_not_dropped():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    items = [{"messages": messages, "response": "c"}, {"messages": messages, "group": 1, "id": "x"}]
    async with running(boastful()) as (_, client):
        mixed, alone = (await client.post("/v1/rewards", json={"items": items})).json()["data"]
    assert mixed["score"] is None and "has messages and response, which would not be read" in mixed["error"]
    assert "would not be read" not in (alone["error"] or "")
