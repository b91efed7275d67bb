"""A server that is down costs a round seconds, not seconds a call and a reward, however it is down."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.rewards.judges.judge_server import Answer, JudgeServer, completion, error
from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.servers import PROBES

ROUND = 64
YES = completion("Yes", tokens=[("Yes", -0.1), ("No", -2.0)])


@pytest.fixture
def start():
    servers = []

    def one(behave: Callable[[Any, int], Answer | None] = lambda body, number: error(503)) -> JudgeServer:
        servers.append(JudgeServer(""))
        servers[-1].behave = behave
        servers[-1].start()
        return servers[-1]

    yield one
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def pauses_are_short(monkeypatch):
    """Calls decide, not seconds; that all pauses come to less than 10 s is told in test_judge_client."""
    monkeypatch.setattr("vlmrm.rewards.servers.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("vlmrm.rewards.servers.PACE", 0.02)


def judges(url: str, *names: str, **settings) -> list[dict]:
    common = {"reward_model": "vllm_evaluate", "api_base_url": f"{url}/v1", "on_failure": "mask", **settings}
    return [{"name": name, "question": f"Is it {name}?", **common} for name in names]


def services(url: str, *names: str, **settings) -> list[dict]:
    common = {"reward_model": "remote_pointwise", "server_url": url, "on_failure": "mask", **settings}
    return [
        {"name": name, "batch_size": 1, "retry_attempts": 2 + number, **common} for number, name in enumerate(names)
    ]


def scored(*config: list[dict], size: int = ROUND) -> Rewards:
    images = [Image.new("RGB", (28, 28), (number, 0, 0)) for number in range(size)]
    return RewardSet([reward for part in config for reward in part])(prompt=["a cat"] * size, image=images)


@pytest.mark.smoke
def test_rewards_of_one_failing_server_share_a_breaker(start):
    server = start()
    outcome = scored(judges(server.url, "one", "two"), services(server.url, "three", "four"))
    assert all(np.isnan(values).all() for values in outcome.rewards.values())
    # A row of failures with those under way meanwhile (100 at a time), the probes, and one call for the service.
    assert len(server.bodies) <= 100 + PROBES + 1
    for name in ("two", "three", "four"):
        assert "not asked, since" in outcome.failures[name][ROUND - 1] and "503" in outcome.failures[name][0]


def test_a_refusing_service_is_not_asked_by_others(start):
    server = start()
    rewards = RewardSet(services(server.url, "one", "two") + judges(server.url, "three"))
    server.close()
    images = [Image.new("RGB", (28, 28), (number, 0, 0)) for number in range(ROUND)]
    outcome = rewards(prompt=["a cat"] * ROUND, image=images)
    for name in ("two", "three"):
        assert set(outcome.failures[name]) == set(range(ROUND))
        assert all("not asked, since" in reason and "refused" in reason for reason in outcome.failures[name].values())


def test_a_silent_server_is_waited_for_once(start):
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        outcome = scored(judges(url, "one", "two", silence=0.5, timeout=600.0))
    assert "has answered nothing for 0.5 s" in outcome.failures["one"][0]
    assert all("not asked, since" in reason for reason in outcome.failures["two"].values())


def test_a_trained_model_falling_silent_is_down_soon(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.built_in.vlm_reward.SILENCE", 0.5)
    monkeypatch.setattr("vlmrm.rewards.servers.LONG", 0.4)
    server = start()
    settings = {"reward_model": "vlm_reward", "model_path": server.url, "on_failure": "mask", "timeout": 600.0}
    rewards = RewardSet({"name": "it", **settings})
    server.close()
    with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2])), backlog=512):
        outcome = rewards(prompt=["a cat"] * 2, response=["one", "two"])
    assert "has answered nothing for 0.5 s" in outcome.failures["it"][1]


def test_a_service_that_falls_silent_costs_one_timeout(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.servers.LONG", 0.5)
    server = start(lambda *_: server.hold())
    outcome = scored(services(server.url, "one", "two", timeout=1.0))
    assert "did not answer in 1 s" in outcome.failures["one"][0] and len(server.bodies) == 1
    assert all("not asked, since" in reason for reason in outcome.failures["two"].values())


def test_a_slow_judge_that_lives_is_waited_for(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.servers.PING_AFTER", 0.05)
    server = start(lambda *_: YES if all(server.pings.acquire(timeout=60) for _ in range(3)) else error(500))
    outcome = scored(judges(server.url, "one", silence=0.3, max_retries=0), size=1)
    assert outcome.failures["one"] == {}


def test_failing_models_or_keys_silence_no_others(start):
    def answer(body, number):
        if "bad" in server.headers[number]["authorization"]:
            return error(401)
        return error(503) if body["model"] == "broken" else YES

    server = start(answer)
    outcome = scored(judges(server.url, "broken", vlm_model="broken"), judges(server.url, "well"))
    assert {name: len(failures) for name, failures in outcome.failures.items()} == {"broken": ROUND, "well": 0}
    with pytest.raises(RewardError, match=r"reward keyless: the judge .* answered 401"):
        scored(judges(server.url, "keyless", api_key="bad"))
    assert not scored(judges(server.url, "well")).failures["well"]
