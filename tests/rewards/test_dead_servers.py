"""A server that is down costs a round seconds, not seconds a call and a reward, however it is down."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.servers import FAILURES, PROBES

ROUND = 64
YES = {"token": "Yes", "logprob": -0.1, "bytes": None}
REPLY = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Yes"},
            "logprobs": {"content": [{**YES, "top_logprobs": [YES, {**YES, "token": "No", "logprob": -2.0}]}]},
        }
    ]
}


class Quiet(ThreadingHTTPServer):
    request_queue_size = 512  # the clients connect at once

    def handle_error(self, request, client_address):
        pass  # who gave up waiting is gone


class ReadyServer:
    """Says that it is ready, and answers a call with the status that `answer(body, headers)` returns."""

    def __init__(self, answer: Callable[[Any, Any], int]):
        self.calls: list[Any] = []
        self.pings = threading.Semaphore(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.pings.release()
                # Or a closed server would answer on it. Said, as a call on a connection that just closes is lost.
                self._send(200, b"", ("Connection", "close"))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.calls.append(body)
                self._send(answer(body, self.headers), json.dumps(REPLY).encode())

            def _send(self, status, body, *headers):
                self.send_response(status)
                for name, value in (("Content-Length", str(len(body))), *headers):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format, *args):
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def start():
    servers = []

    def one(answer: Callable[[Any, Any], int] = lambda body, headers: 503) -> ReadyServer:
        servers.append(ReadyServer(answer))
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
def test_all_rewards_of_a_server_that_answers_errors_share_one_breaker(start):
    server = start()
    outcome = scored(judges(server.url, "one", "two"), services(server.url, "three", "four"))
    assert all(np.isnan(values).all() for values in outcome.rewards.values())
    # A row of failures with those under way meanwhile (100 at a time), the probes, and one call for the service.
    assert len(server.calls) <= 100 + PROBES + 1
    for name in ("two", "three", "four"):
        assert "not asked, since" in outcome.failures[name][ROUND - 1] and "503" in outcome.failures[name][0]


def test_a_service_that_refuses_connections_is_asked_a_few_times_by_all_rewards_together(start, monkeypatch):
    server = start()
    rewards = RewardSet(services(server.url, "one", "two") + judges(server.url, "three"))
    server.close()
    sent = []
    for reward in rewards.rewards[:2]:
        [endpoint] = reward.model.servers.endpoints
        call = endpoint.server.call
        monkeypatch.setattr(endpoint.server, "call", lambda *a, call=call, **k: (sent.append(a), call(*a, **k))[1])
    images = [Image.new("RGB", (28, 28), (number, 0, 0)) for number in range(ROUND)]
    outcome = rewards(prompt=["a cat"] * ROUND, image=images)
    assert len(sent) <= FAILURES + PROBES
    for name in ("two", "three"):
        assert set(outcome.failures[name]) == set(range(ROUND))
        assert all("not asked, since" in reason and "refused" in reason for reason in outcome.failures[name].values())


def test_a_server_that_takes_calls_and_never_answers_is_waited_for_once(start):
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        outcome = scored(judges(url, "one", "two", silence=0.5, timeout=600.0))
    assert "has answered nothing for 0.5 s" in outcome.failures["one"][0]
    assert all("not asked, since" in reason for reason in outcome.failures["two"].values())


def test_a_service_that_falls_silent_costs_one_timeout(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.servers.LONG", 0.5)
    never = threading.Event()
    server = start(lambda body, headers: never.wait(60) and 200)
    outcome = scored(services(server.url, "one", "two", timeout=1.0))
    never.set()
    assert "did not answer in 1 s" in outcome.failures["one"][0] and len(server.calls) == 1
    assert all("not asked, since" in reason for reason in outcome.failures["two"].values())


def test_a_judge_that_thinks_for_long_but_lives_is_waited_for(start, monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.servers.PING_AFTER", 0.05)
    server = start(lambda body, headers: 200 if all(server.pings.acquire(timeout=60) for _ in range(3)) else 500)
    outcome = scored(judges(server.url, "one", silence=0.3, max_retries=0), size=1)
    assert outcome.failures["one"] == {}


def test_a_model_that_fails_does_not_silence_another_of_its_server_nor_a_bad_key_a_good_one(start):
    def answer(body, headers):
        if "bad" in headers["Authorization"]:
            return 401
        return 503 if body["model"] == "broken" else 200

    server = start(answer)
    outcome = scored(judges(server.url, "broken", vlm_model="broken"), judges(server.url, "well"))
    assert {name: len(failures) for name, failures in outcome.failures.items()} == {"broken": ROUND, "well": 0}
    with pytest.raises(RewardError, match=r"reward keyless: the judge .* answered 401"):
        scored(judges(server.url, "keyless", api_key="bad"))
    assert not scored(judges(server.url, "well")).failures["well"]
