"""Remote rewards against a real server on this machine, well and with faults."""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest
import torch
from PIL import Image
from reward_server import RewardServer, decoded

from vlmrm.errors import ConfigError, RewardError
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
    (path, headers, first), (_, _, second) = server.requests
    assert path == "/compute"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert list(first) == ["prompt", "image", "video", "condition_images", "condition_videos"]
    assert (first["prompt"], second["prompt"]) == (["a", "b"], ["ü"])
    assert first["condition_videos"] is None
    assert [len(frames) for frames in first["video"]] == [2, 3]
    assert [len(images) for images in first["condition_images"]] == [1, 2]
    np.testing.assert_array_equal(np.asarray(decoded(first["image"][1])), np.asarray(pictures(30)[0]))
    np.testing.assert_array_equal(
        np.asarray(decoded(first["video"][0][1])), (video[1] * 255).round().byte().permute(1, 2, 0).numpy()
    )


def test_answers_in_words_are_sent(start):
    server = start()
    rewards = RewardSet({"name": "far", "reward_model": "remote_pointwise", "server_url": server.url})
    for _ in range(2):
        rewards(
            prompt=["a", "b"], image=pictures(40, 30), response=["Red.", [{"role": "assistant", "content": "No."}]]
        )
    assert [body["response"] for _, _, body in server.requests] == [["Red.", "No."]] * 2


def test_a_group_is_one_request_whatever_the_batch_size(start):
    server = start(prefix="/ranking")
    rewards = remote(server.url, "vlmrm.rewards.remote.RemoteGroupwiseRewardModel", batch_size=1)
    scored = rewards(prompt=["a", "b", "a"], image=pictures(40, 30, 50), groups=[0, 1, 0])
    assert scored.rewards["far"].tolist() == [40, 30, 50]
    assert [(path, body["prompt"]) for path, _, body in server.requests] == [
        ("/ranking/compute", ["a", "a"]),
        ("/ranking/compute", ["b"]),
    ]
    assert rewards.rewards[0].model.servers.endpoints[0].timeout == 120


def test_what_passes_is_asked_again_and_the_server_says_when(start, waits):
    server = start()
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=55))
    server.faults.extend(
        [
            (503, '{"detail": "loading"}', {"Retry-After": "7"}),
            (429, "", {"Retry-After": later}),
            (502, "<html>"),
            RewardServer.CUT,
        ]
    )
    rewards = remote(server.url, retry_attempts=5)
    assert rewards(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]
    assert len(server.requests) == 5
    assert 7 <= waits[0] < 8
    assert 10 < waits[1] <= 61  # without that header it would be 10 at most
    assert 0 < waits[2] < waits[3] + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((500, '{"detail": "CUDA out of memory"}'), "answered 500: CUDA out of memory"),
        ((400, '{"detail": [{"msg": "no prompt"}]}'), r'answered 400: \[{"msg": "no prompt"}\]'),
        ((404, "x" * 5000), "answered 404: x{300}[.]{3}$"),
        ((307, "", {"Location": "/there"}), "answered 307, a redirect"),
        ((503, "", {"Retry-After": "86400"}), "answered 503"),
        ((200, "<html>hello</html>"), "did not answer with JSON: <html>hello</html>"),
        ((200, '{"rewards": [1.0], "error": "no such model"}'), "the server says: no such model"),
        ((200, "[1.0]"), r"answered \[1.0\]: it must be an object"),
        ((200, '{"scores": [1.0]}'), "its rewards must be a list of numbers"),
        ((200, '{"rewards": ["1.0"]}'), "its rewards must be a list of numbers"),
        ((200, '{"rewards": [[1.0]]}'), "its rewards must be a list of numbers"),
        ((200, '{"rewards": [1.0, 2.0]}'), "answered 2 rewards for 1 samples"),
        ((200, '{"rewards": [NaN]}'), "first sample 0: its reward is nan"),
        ((200, '{"rewards": [null]}'), "first sample 0: its reward is None"),
        ((200, '{"rewards": [1' + 400 * "0" + "]}"), "first sample 0: its reward is inf"),
    ],
)
def test_what_cannot_pass_is_an_error_at_once_with_the_servers_words(start, waits, fault, message):
    server = start()
    server.faults.append(fault)
    with pytest.raises(RewardError, match=message):
        remote(server.url)(prompt=["a"], image=pictures(40))
    assert len(server.requests) == 1


def test_a_server_that_stays_away_is_an_error_and_can_be_masked(start, waits):
    server = start()
    server.faults.extend([(503, "queue full")] * 6)
    with pytest.raises(RewardError, match=r"reward far: .*answered 503: queue full \(asked 3 times in 0 s\)"):
        remote(server.url)(prompt=["a"], image=pictures(40))
    scored = remote(server.url, on_failure="mask")(prompt=["a"], image=pictures(40))
    assert np.isnan(scored.rewards["far"]).all()
    assert "queue full" in scored.failures["far"][0]
    assert len(server.requests) == 6


def test_patience_outlasts_a_server_that_is_away(start, waits):
    server = start()
    server.faults.extend([(503, "loading")] * 6)

    [reward] = remote(server.url, patience=600.0, retry_attempts=2)(prompt=["a"], image=pictures(40)).rewards["far"]

    assert reward == 40 and len(server.requests) == 7


def test_a_reward_that_refuses_everything_is_gone_after_three_rounds(start):
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


def test_a_silent_server_is_asked_once(start):
    server = start()
    server.faults.append(RewardServer.SILENT)
    with pytest.raises(RewardError, match=r"did not answer in 2 s: raise timeout"):
        remote(server.url, timeout=2.0)(prompt=["a"], image=pictures(40))
    assert len(server.requests) == 1


def test_requests_at_a_time_go_to_different_servers(start):
    both = asyncio.Barrier(2)
    servers = [start(), start()]
    rewards = remote([server.url for server in servers], batch_size=1, async_reward=True, num_workers=2)
    for endpoint in rewards.rewards[0].model.servers.endpoints:

        async def together(*args, call=endpoint.server.call, **kwargs):
            await both.wait()
            return await call(*args, **kwargs)

        endpoint.server.call = together
    assert rewards(prompt=list("abcd"), image=pictures(40, 30, 50, 28)).rewards["far"].tolist() == [40, 30, 50, 28]
    assert [len(server.requests) for server in servers] == [2, 2]
    rewards.close()


def test_another_server_takes_over_without_waiting(start, waits):
    broken, well = start(), start()
    broken.faults.extend([(503, "")] * 9)
    rewards = remote([broken.url, well.url], batch_size=1)
    assert rewards(prompt=list("abcd"), image=pictures(40, 30, 50, 28)).rewards["far"].tolist() == [40, 30, 50, 28]
    assert len(broken.requests) == 1  # it rests
    assert len(well.requests) == 4
    assert waits == []


def test_it_waits_for_a_server_that_is_not_ready(start, waits):
    server = start()
    server.health.extend([503, 503])
    rewards = remote(server.url, wait_seconds=60)
    assert len(waits) == 2
    assert rewards(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]


def test_a_server_that_is_not_there_is_an_error_unless_another_is(start, nowhere, caplog):
    well = start()
    with pytest.raises(
        RewardError, match=rf"far: no reward server is ready \({nowhere}/health cannot be reached .*refused"
    ):
        remote(nowhere)
    rewards = remote([nowhere, well.url])
    assert f"going on without 1 of 2 reward servers ({nowhere}/health" in caplog.text
    assert rewards(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]


def test_credentials_are_sent_and_never_said(start, nowhere, waits, caplog):
    server = start()
    server.faults.extend([(503, "")] * 3)
    rewards = remote(server.url.replace("//", "//me:s%20cret@"))
    with pytest.raises(RewardError) as raised:
        rewards(prompt=["a"], image=pictures(40))
    assert server.requests[0][1]["Authorization"] == "Basic bWU6cyBjcmV0"
    assert server.url in str(raised.value)
    with pytest.raises(RewardError) as unready:
        remote(nowhere.replace("//", "//me:s%20cret@"))
    shown = repr(rewards.rewards[0].arguments)
    assert server.url.replace("//", "//***@") in shown
    for text in (str(raised.value), str(unready.value), caplog.text, shown):
        assert "cret" not in text


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(start, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert remote(start().url)(prompt=["a"], image=pictures(40)).rewards["far"].tolist() == [40]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_url": None}, "reward far has no server_url: write http://host:port"),
        ({"server_url": []}, "has no server_url"),
        ({"server_url": "localhost:8000"}, "server_url localhost:8000 cannot be used"),
        ({"server_url": "http://me:secret@host?key=1"}, "server_url http://host cannot be used"),
        ({"server_url": "http://host:port"}, "a server_url is no address"),
        ({"retry_attempts": 0}, "reward far: retry_attempts: Input should be greater than or equal to 1"),
        ({"timeout": 0}, "timeout: Input should be greater than 0"),
        ({"wait_seconds": "long"}, "wait_seconds: Input should be a valid number"),
        ({"server_urls": "x"}, "unknown key 'server_urls': did you mean server_url"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardSet({"name": "far", "reward_model": "Remote_Pointwise", "server_url": "http://127.0.0.1:9", **settings})


def test_a_prompt_that_is_no_text_fails_alone(start):
    prompts = ["a", [{"role": "user", "content": "a"}]]
    scored = remote(start().url, on_failure="mask")(prompt=prompts, image=pictures(40, 50))
    assert scored.rewards["far"][0] == 40
    assert "takes one text: a service of vlmrm takes messages by vlm_reward" in scored.failures["far"][1]


def test_a_round_without_texts_ends_and_says_what_takes_messages(start):
    with pytest.raises(RewardError, match=r"reward far: its prompt is messages.*vlm_reward.* model_path: ADDRESS"):
        remote(start().url, on_failure="mask")(prompt=[[{"role": "user", "content": "a"}]], image=pictures(40))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_round_that_is_refused_for_good_ends_with_the_server_s_words(start, status):
    server = start()
    far = remote(server.url, on_failure="mask", batch_size=1)
    server.faults.extend([(status, '{"error": "who are you?"}')] * 2)
    with pytest.raises(RewardError, match=rf"reward far: .*/compute answered {status}: who are you\?"):
        far(prompt=["a", "b"], image=pictures(40, 50))
    server.faults.append((status, ""))
    np.testing.assert_array_equal(far(prompt=["a", "b"], image=pictures(40, 50)).rewards["far"], [np.nan, 50.0])
