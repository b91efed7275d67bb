"""Remote rewards against a real server on this machine, well and with faults."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from tests.rewards.reward_server import RewardServer, decoded
from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet


@pytest.fixture
def start():
    servers = []

    def one(**settings) -> RewardServer:
        servers.append(RewardServer(**settings))
        return servers[-1]

    yield one
    for server in servers:
        server.close()


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """How long the client would have waited between two requests; it does not."""
    waited: list[float] = []
    pausing = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            waited.append(seconds)
        await pausing(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    return waited


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What a slow machine takes is no fault of a server's, and one that rests does so for the whole test."""
    monkeypatch.setattr("vlmrm.rewards.remote.HEALTH_TIMEOUT", 60.0)
    monkeypatch.setattr("vlmrm.rewards.remote.REST", 3600.0)


@pytest.fixture
def nowhere():
    """The address of a port that is nobody's, and will not be: it is bound, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def remote(url, model="remote_pointwise", **settings) -> RewardSet:
    return RewardSet({"name": "far", "reward_model": model, "server_url": url, **settings})


def pictures(*widths: int) -> list[Image.Image]:
    return [Image.new("RGB", (width, 28), (width, 20, 30)) for width in widths]


def test_the_protocol(start):
    server = start()
    video = torch.rand(2, 3, 28, 30)
    scored = remote(f"{server.url}/", batch_size=2)(
        prompt=["a", "b", "ü"],
        image=pictures(40, 30, 50),
        video=[video, pictures(28, 28, 28), video],
        condition_images=[pictures(28), pictures(28, 29), pictures(28)],
    )
    assert scored.rewards["far"].tolist() == [40, 30, 50]
    first, second = server.bodies
    assert server.paths[0] == "/compute" and server.headers[0]["content-type"] == "application/json"
    assert "authorization" not in server.headers[0]
    assert list(first) == ["prompt", "image", "video", "condition_images", "condition_videos"]
    assert (first["prompt"], second["prompt"], first["condition_videos"]) == (["a", "b"], ["ü"], None)
    assert [len(frames) for frames in first["video"]] == [2, 3]
    assert [len(images) for images in first["condition_images"]] == [1, 2]
    np.testing.assert_array_equal(np.asarray(decoded(first["image"][1])), np.asarray(pictures(30)[0]))
    np.testing.assert_array_equal(
        np.asarray(decoded(first["video"][0][1])), (video[1] * 255).round().byte().permute(1, 2, 0).numpy()
    )


def test_answers_in_words_are_sent(start):
    server = start()
    answers = ["Red.", [{"role": "assistant", "content": "No."}]]
    remote(server.url)(prompt=["a", "b"], image=pictures(40, 30), response=answers)
    assert [body["response"] for body in server.bodies] == [["Red.", "No."]]


def test_a_group_is_one_request_whatever_batch_size(start):
    server = start(prefix="/ranking")
    rewards = remote(server.url, "vlmrm.rewards.remote.RemoteGroupwiseRewardModel", batch_size=1)
    scored = rewards(prompt=["a", "b", "a"], image=pictures(40, 30, 50), groups=[0, 1, 0])
    assert scored.rewards["far"].tolist() == [40, 30, 50]
    assert server.paths == ["/ranking/compute"] * 2
    assert [body["prompt"] for body in server.bodies] == [["a", "a"], ["b"]]


def test_transient_faults_are_retried_when_the_server_says(start, waits):
    server = start()
    server.faults.extend([(503, "", {"Retry-After": "7"}), (429, "", {"Retry-After": "55"})])
    server.faults.extend([(502, "<html>"), RewardServer.CUT])

    scored = remote(server.url, retry_attempts=5)(prompt=["a"], image=pictures(40))

    assert scored.rewards["far"].tolist() == [40] and len(server.bodies) == 5
    assert 7 <= waits[0] < 8
    assert 55 <= waits[1] <= 61  # without that header it would be 10 at most


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((500, '{"detail": "CUDA out of memory"}'), "answered 500: CUDA out of memory"),
        ((404, "x" * 5000), "answered 404: x{300}[.]{3}$"),
        ((503, "", {"Retry-After": "86400"}), "answered 503"),
        ((200, "<html>hello</html>"), "<html>hello</html>"),
        ((200, '{"rewards": [1.0], "error": "no such model"}'), "no such model"),
        ((200, '{"scores": [1.0]}'), "a list of numbers"),
        ((200, '{"rewards": ["1.0"]}'), "a list of numbers"),
        ((200, '{"rewards": [1.0, 2.0]}'), "2 rewards for 1 samples"),
        ((200, '{"rewards": [NaN]}'), "sample 0: its reward is nan"),
        ((200, '{"rewards": [null]}'), "sample 0: its reward is None"),
    ],
)
def test_permanent_faults_end_at_once_quoting_the_server(start, waits, fault, message):
    server = start()
    server.faults.append(fault)
    with pytest.raises(RewardError, match=message):
        remote(server.url)(prompt=["a"], image=pictures(40))
    assert len(server.bodies) == 1


def test_a_server_staying_away_errors_or_is_masked(start, waits):
    server = start()
    server.faults.extend([(503, "queue full")] * 6)
    with pytest.raises(RewardError, match=r"reward far: .*queue full \(asked 3 times"):
        remote(server.url)(prompt=["a"], image=pictures(40))
    scored = remote(server.url, on_failure="mask")(prompt=["a"], image=pictures(40))
    assert np.isnan(scored.rewards["far"]).all() and "queue full" in scored.failures["far"][0]
    assert len(server.bodies) == 6


def test_patience_outlasts_a_server_that_is_away(start, waits):
    server = start()
    server.faults.extend([(503, "loading")] * 6)

    [reward] = remote(server.url, patience=600.0, retry_attempts=2)(prompt=["a"], image=pictures(40)).rewards["far"]

    assert reward == 40 and len(server.bodies) == 7


def test_a_reward_refusing_everything_ends_after_three_rounds(start):
    server = start()
    far = remote(server.url, on_failure="mask", max_missing=0.9)
    server.faults.extend([(400, '{"error": "too long"}')] * 2)
    for _ in range(2):
        assert np.isnan(far(prompt=["a"], image=pictures(40)).rewards["far"]).all()
    assert far(prompt=["a"], image=pictures(40)).rewards["far"] == [40], "a round that passes begins the count anew"
    server.faults.extend([(400, '{"error": "too long"}')] * 3)
    for _ in range(2):
        far(prompt=["a"], image=pictures(40))
    with pytest.raises(RewardError, match=r"reward far is gone: 3 rounds in a row over 90% .*400: too long"):
        far(prompt=["a"], image=pictures(40))


def test_requests_at_a_time_go_to_different_servers(start):
    servers, both = [start(), start()], threading.Barrier(2, timeout=60)
    for server in servers:
        server.behave = lambda body, number, widths=server.widths: (both.wait(), widths(body, number))[1]
    rewards = remote([server.url for server in servers], batch_size=1, async_reward=True, num_workers=2)
    assert rewards(prompt=list("abcd"), image=pictures(40, 30, 50, 28)).rewards["far"].tolist() == [40, 30, 50, 28]
    assert [len(server.bodies) for server in servers] == [2, 2]
    rewards.close()


def test_another_server_takes_over_without_waiting(start, waits):
    broken, well = start(), start()
    broken.faults.extend([(503, "")] * 9)
    rewards = remote([broken.url, well.url], batch_size=1)
    assert rewards(prompt=list("abcd"), image=pictures(40, 30, 50, 28)).rewards["far"].tolist() == [40, 30, 50, 28]
    assert (len(broken.bodies), len(well.bodies), waits) == (1, 4, [])


def test_a_reward_waits_for_an_unready_server(start, waits):
    server = start()
    server.health.extend([503, 503])
    rewards = remote(server.url, wait_seconds=60)
    assert len(waits) == 2
    assert rewards(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]


def test_a_server_has_longer_to_answer_at_the_start(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.remote.HEALTH_TIMEOUT", 1e-6)
    remote(start().url)


def test_an_absent_server_is_fatal_unless_another_answers(start, nowhere, caplog):
    well = start()
    with pytest.raises(RewardError, match=rf"{nowhere}/health cannot be reached .*refused"):
        remote(nowhere)
    rewards = remote([nowhere, well.url])
    assert f"without 1 of 2 reward servers ({nowhere}/health" in caplog.text
    assert rewards(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]


def test_credentials_are_sent_and_never_said(start, waits, caplog):
    server = start()
    server.faults.extend([(503, "")] * 3)
    rewards = remote(server.url.replace("//", "//me:s%20cret@"))
    with pytest.raises(RewardError) as raised:
        rewards(prompt=["a"], image=pictures(40))
    assert server.headers[0]["authorization"] == "Basic bWU6cyBjcmV0"
    assert server.url in str(raised.value)
    assert "cret" not in f"{raised.value} {caplog.text} {rewards.rewards[0].arguments!r}"


def test_a_prompt_that_is_no_text_fails_alone(start):
    prompts = ["a", [{"role": "user", "content": "a"}]]
    scored = remote(start().url, on_failure="mask")(prompt=prompts, image=pictures(40, 50))
    assert scored.rewards["far"][0] == 40
    assert "takes one text" in scored.failures["far"][1]
    with pytest.raises(RewardError, match="vlm_reward"):  # which takes messages
        remote(start().url, on_failure="mask")(prompt=prompts[1:], image=pictures(50))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_round_refused_for_good_quotes_the_server(start, status):
    server = start()
    far = remote(server.url, on_failure="mask", batch_size=1)
    server.faults.extend([(status, '{"error": "who are you?"}')] * 2)
    with pytest.raises(RewardError, match=rf"reward far: .*answered {status}: who are you"):
        far(prompt=["a", "b"], image=pictures(40, 50))
    server.faults.append((status, ""))
    np.testing.assert_array_equal(far(prompt=["a", "b"], image=pictures(40, 50)).rewards["far"], [np.nan, 50.0])
