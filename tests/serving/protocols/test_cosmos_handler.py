"""Rewards that were written for cosmos-rl's service run as they are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.serving.protocols.cosmos_client import CosmosClient
from tests.serving.sent_media import npy
from tests.serving.services import HERE, fake, in_loop, running
from vlmrm.serving.worker.cosmos_handler import CosmosHandler

IMAGES = np.random.default_rng(0).integers(0, 255, (2, 5, 4, 3), dtype=np.uint8)
VIDEOS = np.random.default_rng(1).integers(0, 255, (2, 3, 6, 5, 4), dtype=np.uint8)


@pytest.fixture
def handler(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    return CosmosHandler("tests.serving.handlers.Brightness", "weights", "cpu", dtype="float32", download_path="files")


def item(array, prompt="a", group="request", **more):
    name = "image" if array.ndim == 3 else "video"
    return {"prompt": prompt, name: {"npy": npy(array)}, "group": group, **more}


def images(*prompts, **more):
    return [item(image.transpose(2, 0, 1), prompt, **more) for image, prompt in zip(IMAGES, prompts, strict=True)]


def test_a_request_is_one_call_scored_by_sample(handler):
    both = handler([*images("a", "b"), *images("c", "d", group="another")])
    assert [one["extra"]["scores"]["groups"]["call"] for one in both] == [1, 1, 2, 2]
    assert [one["score"] for one in both[:2]] == pytest.approx(IMAGES.mean(axis=(1, 2, 3)), rel=1e-6)
    assert [one["extra"]["scores"]["said"] for one in both[:2]] == ["a [2, 5, 4, 3]", "b [2, 5, 4, 3]"]


def test_a_handler_without_an_answer_is_an_error(handler):
    assert handler(images("a", "fail")) == [{"error": "brightness: no weights"}] * 2
    handler.handler.scale = float("nan")
    assert handler(images("a", "b"))[0] == {"error": "its brightness is nan"}
    handler.score_key = "beauty"
    handler.handler.scale = 1.0
    assert "set score_key" in handler(images("a", "b"))[0]["error"]
    sizes = [*images("a", "b")[:1], item(np.zeros((3, 9, 9), np.uint8))]
    assert handler(sizes) == [{"error": "the images of one request differ in size: resize them to one"}] * 2


@in_loop
async def test_a_handler_serves_the_trainer_its_own_keys():
    settings = fake(
        "new_reward",
        "cosmos_handler.CosmosHandler",
        device="cpu",
        model_path="weights",
        options={"handler": "handlers.Brightness"},
    )
    async with running(settings) as (_, http):
        client = CosmosClient(http)
        ticket = await client.enqueue(
            IMAGES, prompts=["a", "b"], reward_fn={"new_reward": 1.0}, media_type="image", moods=[7, 8]
        )
        rewards = await client.fetch(ticket, "new_reward", "brightness")
        answer = (await http.post("/api/reward/pull", json={"uuid": ticket})).json()
    np.testing.assert_allclose(rewards, IMAGES.mean(axis=(1, 2, 3)), rtol=1e-6)
    assert answer["scores"]["groups"] == {"call": [1, 1], "mood": [7, 8]}
    assert answer["type"] == "new_reward"


@in_loop
async def test_our_rewards_see_the_pictures_of_the_trainer():
    settings = {"reward_type": "shown_reward.Shown", "name": "shown", "import_from": [HERE], "device": "cpu"}
    async with running(settings) as (_, http):
        client = CosmosClient(http)
        common = {"prompts": ["a", "b"], "reward_fn": {"shown": 1.0}}
        ticket = await client.enqueue(IMAGES, **common, media_type="image")
        assert (await client.fetch(ticket, "shown", "shown")).tolist() == (10.0 * IMAGES[:, 0, 0, 0]).tolist()
        rates = [{"video_fps": 0.25}, {"video_fps": 0.5}]
        ticket = await client.enqueue(VIDEOS, **common, media_type="video", video_infos=rates)
        expected = 10.0 * VIDEOS[:, 0, -1, 0, 0] + [0.25, 0.5]
        assert (await client.fetch(ticket, "shown", "shown")).tolist() == expected.tolist()
