"""Rewards of slime, verl-omni and UniRL: what their clients post, and the value that they take from the answer.

Of slime/rollout/rm_hub, verl_omni/utils/reward_score/http_scorer_client.py and unirl/reward/remote.py.
"""

from __future__ import annotations

import base64
import os
import pickle
from datetime import UTC, datetime

import pytest

from tests.serving.sent_media import clip, png
from tests.serving.services import eventually, fake, in_loop, running
from vlmrm.errors import RowError
from vlmrm.formats.wire import MAX_OPERATIONS, read_pickle

CHARACTERS = fake("characters", "fake_reward.Characters")
PNG = base64.b64encode(png()).decode()


@in_loop
async def test_slime_gets_a_number_or_an_error_status():
    async with running(fake("length", "fake_reward.LastText")) as (_, client):
        for answered, reward in (("four", 4.0), ("", 0.0)):
            answer = await client.post("/remote_rm", json={"prompt": "Why?", "response": answered, "label": None})
            assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
            assert type(answer.json()) is float and answer.json() == reward
        for answered, status in (("refuse", 400), ("raise", 500)):
            failed = await client.post("/length/remote_rm", json={"prompt": "Why?", "response": answered})
            assert failed.status_code == status


def posted(**content: object) -> bytes:
    return pickle.dumps({"images": [png()], "prompts": ["Why?"], "metadata": {}, **content})


@in_loop
async def test_verl_omni_gets_a_pickle_for_its_pickle():
    async with running(CHARACTERS) as (_, client):
        answer = await client.post("/verl_omni", content=posted())
        assert (answer.status_code, pickle.loads(answer.content)) == (200, {"scores": [1.4]})
        two = await client.post("/characters/verl_omni", content=posted(images=[png()] * 2, prompts=["a", "a"]))
        assert pickle.loads(two.content) == {"scores": [1.1, 1.1]}
        for content, reason in (
            (posted(prompts=[]), "there are 1 images but 0 of prompts"),
            (posted(images=[b"GIF"]), "image 0: "),
            (posted(metadata={"a": 1}), "metadata: "),
            (posted(images=[1]), "images.0: "),
            (pickle.dumps([1]), "a valid dictionary"),
            (b"{}", "no whole pickle"),
            (posted()[:-1], "no whole pickle"),
        ):
            refused = await client.post("/verl_omni", content=content)
            assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", [Harmful(), datetime.now(UTC), os.mkdir, {1}, object()])
def test_a_pickle_beyond_plain_data_is_never_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for held in (content, {"images": [content]}):
        with pytest.raises(RowError, match="holds more than plain data"):
            read_pickle(pickle.dumps(held))
    assert not os.listdir(tmp_path)


def test_a_pickle_cannot_multiply_its_objects():
    with pytest.raises(RowError, match="send fewer"):
        read_pickle(b"\x80\x04" + b"]" * (MAX_OPERATIONS + 1))
    twice = []
    with pytest.raises(RowError, match="more than plain data"):
        read_pickle(pickle.dumps([twice, twice]))


def turn(**media: str) -> dict:
    return {"text": "Why?", **media}


def wish(*turns: dict, rewards: tuple[str, ...] = ("characters",)) -> dict:
    return {"history": list(turns), "required_rewards": list(rewards), "metadata": None}


@in_loop
async def test_unirl_gets_each_reward_or_its_error():
    rewards = (CHARACTERS, fake("size", "fake_reward.ImageBytes"), fake("broken", "fake_reward.Broken"))
    async with running(*rewards) as (service, client):
        await eventually(lambda: service.health("broken").unavailable)
        picture = turn(image_b64=PNG)
        requests = [
            wish(picture, rewards=("characters", "size")),
            wish(picture, rewards=("broken", "size")),
            wish(turn(video_b64=base64.b64encode(clip()).decode()), rewards=("size",)),
            wish(turn(image_b64="%")),
        ]
        answer = (await client.post("/unirl/score", json={"requests": requests})).json()
        health = (await client.get("/unirl/health")).json()
        names = (await client.get("/unirl/rewards")).json()
        unknown = await client.post("/unirl/score", json={"requests": [wish(picture, rewards=("none",))]})
        failed = await client.post("/unirl/score", json={"requests": [wish(picture, rewards=("broken",))]})
    assert health == {"status": "ok", "rewards": {"characters": [True], "size": [True], "broken": [False]}}
    assert names == {"rewards": ["characters", "size", "broken"]}
    one, two, three, four = answer["results"]
    assert one["characters"] == {"characters": 1.4} and three == four == {}
    assert "size" not in one and "size" in answer["errors"][0]  # a film among them fails the batch of that reward
    assert "the reward broken cannot be computed now" in answer["errors"][1]["broken"] and two == {}
    assert "is not valid base64" in answer["errors"][3]["characters"]
    assert unknown.status_code == 404
    assert failed.status_code == 503 and "retry-after" in failed.headers  # all failed: UniRL asks again


@in_loop
async def test_unirl_history_holds_what_made_the_last_turn(tmp_path):
    (tmp_path / "clip one.mp4").write_bytes(clip())
    async with running(fake("one", "fake_reward.Anything"), media_root=tmp_path) as (_, client):
        path = str(tmp_path / "clip one.mp4")
        for request, error in (
            (wish(turn(image_b64=PNG), turn(image_b64=PNG), rewards=("one",)), None),
            (wish(turn(video_path=path), rewards=("one",)), None),
            (wish(turn(video_path="/etc/passwd"), rewards=("one",)), "outside media_root"),
            (wish(turn(image_b64=PNG), {"text": "Else", "image_b64": PNG}, rewards=("one",)), "reads one prompt"),
            (wish(turn(video_path=path, video_b64="AA"), rewards=("one",)), "send one of them"),
        ):
            answer = (await client.post("/unirl/score", json={"requests": [request]})).json()
            assert (answer["results"], answer["errors"][0]) == ([{"one": {"one": 1.0}}], {}) if error is None else (
                answer["results"] == [{}] and error in answer["errors"][0]["one"]
            ), answer  # fmt: skip
