"""Flow-Factory's own client and ours against a real server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.serving.protocols.flow_factory_client import FlowFactoryClient
from tests.serving.services import Gate, fake, running, served
from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet

RED, BLUE = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
CHARACTERS, GROUP = fake("characters", "fake_reward.Characters"), fake("group", "fake_reward.GroupSize")


@pytest.fixture(scope="module")
def server():
    with served(CHARACTERS, GROUP, fake("broken", "fake_reward.Length"), token="s3cret") as url:
        yield url.replace("http://", "http://trainer:s3cret@")


def test_threaded_clients_get_their_rewards_in_order(server):
    client = FlowFactoryClient(f"{server}/characters/")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: client(["x" * n, "yy"], image=[RED, BLUE]), range(8)))
    assert found == [[pytest.approx(1 + n / 10), 1.2] for n in range(8)]


def test_videos_and_conditions_of_different_lengths_arrive(server):
    client = FlowFactoryClient(f"{server}/characters")
    conditions = [[RED], [RED, BLUE, RED], []]
    assert client(["", "", ""], condition_images=conditions) == [1, 3, 0]
    videos = [[[RED, BLUE]], [[RED], [BLUE]], []]
    assert client(["a", "b", "c"], video=[[RED], [BLUE] * 3, [RED]], condition_videos=videos) == [0.1] * 3


def test_text_answers_are_scored_and_mistyped_keys_named(server):
    client = FlowFactoryClient(f"{server}/characters")
    body = {"prompt": ["a", "bb"], "response": ["ccc", ""]}
    assert client.session.post(f"{client.url}/compute", json=body).json() == {"rewards": [0.4, 0.2]}
    for body, told in (
        ({"prompt": ["a"], "imge": ["b"]}, "unknown key imge (did you mean image?)."),
        ({"prompt": ["a"], "response": []}, "there are 1 prompts but 0 of response."),
    ):
        assert client.session.post(f"{client.url}/compute", json=body).json() == {"error": told}
    assert client.session.post(f"{client.url}/compute", json={"prompt": ["a"], "seed": 1}).json() == {"rewards": [0.1]}


def test_permanent_failures_are_told_once_transient_ones_retried(server, tmp_path):
    client = FlowFactoryClient(f"{server}/broken")
    for prompt, reason in ((["a", "refuse"], "sample 1: it is refused"), (["raise"], "RuntimeError: out of memory")):
        with pytest.raises(RuntimeError, match=f"Server error: .*{reason}"):
            client(prompt)
    assert client.posts == 2
    assert client([f"die once {tmp_path / 'died'}", "aaa"]) == [1, 3]


def test_a_request_resent_after_timeout_is_computed_once(tmp_path, monkeypatch):
    log, gate = tmp_path / "batches", Gate(tmp_path)
    with served(fake(options={"log": str(log)})) as url:
        client = FlowFactoryClient(url)
        post = client.session.post

        def impatient_once(*args, timeout, **body):
            if client.posts == 2:
                gate.open()
            return post(*args, timeout=0.5 if client.posts == 1 else timeout, **body)

        monkeypatch.setattr(client.session, "post", impatient_once)
        assert client([gate.prompt]) == [len(gate.prompt)] and client.posts == 2
    assert log.read_text().splitlines() == [gate.prompt]


@pytest.mark.parametrize("path", ["/nothing", "/characters"])
def test_a_wrong_name_or_token_ends_training_early(server, path):
    url = server.replace("s3cret", "wrong") if path == "/characters" else server
    with pytest.raises(RuntimeError, match="Cannot connect"):
        FlowFactoryClient(f"{url}{path}")


def test_a_reward_that_failed_to_load_is_unhealthy():
    async def ask() -> tuple[int, int]:
        async with running(fake("broken", "fake_reward.Broken")) as (_, client):
            return (await client.get("/broken/health")).status_code, (await client.get("/health")).status_code

    assert asyncio.run(ask()) == (503, 200)


def test_our_client_speaks_it_pointwise_and_groupwise(server):
    pointwise = {"name": "c", "reward_model": "remote_pointwise", "server_url": f"{server}/characters"}
    groupwise = {"name": "g", "reward_model": "remote_groupwise", "server_url": f"{server}/group"}
    rewards = RewardSet([{**pointwise, "batch_size": 2}, groupwise])
    assert FlowFactoryClient(f"{server}/group")(["p"] * 5, image=[RED] * 5) == [5] * 5  # a request is one group
    found = rewards(prompt=["a", "bb", "ccc"], image=[RED, RED, BLUE], groups=[0, 1, 0])
    assert found.rewards["c"].tolist() == pytest.approx([1.1, 1.2, 1.3]) and found.rewards["g"].tolist() == [2, 1, 2]
    with pytest.raises(RewardError, match=r"the server says: .*it is refused"):
        RewardSet({**pointwise, "server_url": f"{server}/broken"})(prompt=["refuse"], image=[RED])
