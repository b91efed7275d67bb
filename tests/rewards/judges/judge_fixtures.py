"""A judge's server, and judges that wait on no clock but the test's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.rewards.judges.judge_server import JudgeServer
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.registry import reward_model_class


class Time:
    """A clock that only sleeping, and the test, move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.slept.append(seconds)
        end = self.now + seconds
        await pausing(0)
        self.now = max(self.now, end)  # others sleep meanwhile


pausing = asyncio.sleep


@pytest.fixture
def server():
    with JudgeServer().running() as running:
        yield running


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr("asyncio.sleep", time.sleep)
    monkeypatch.setattr("vlmrm.http.time", SimpleNamespace(monotonic=time.clock))
    monkeypatch.setattr("vlmrm.rewards.servers.monotonic", time.clock)
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    return time


@pytest.fixture
def judge(server, time):
    """Makes a judge of the test's server by its registered name; it asks once where replies cannot be read."""

    def make(name: str = "unified_reward", **settings):
        settings = {"api_base_url": server.url, "malformed_retries": 0, **settings}
        made = reward_model_class(name)(RewardArguments("it", name, device="cpu", extra_kwargs=settings), None)
        return made

    return make


@pytest.fixture
def picture():
    return Image.radial_gradient("L").resize((40, 32)).convert("RGB")
