"""Asking a judge's server: what is tried again, deadlines, threads and loops, the circuit, the cache, keys."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rewards.judges.judge_server import completion, error
from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.judges.client import JudgeClient, JudgeSettings, Malformed
from vlmrm.rewards.judges.replies import Question, Reply
from vlmrm.rewards.servers import FAILURES, PROBES


@pytest.fixture
def client(server, time):
    def make(**settings) -> JudgeClient:
        return JudgeClient(JudgeSettings(**{"api_base_url": server.url, "vlm_model": "m", **settings}))

    return make


def asked(text: str = "hi", **parameters) -> Question:
    return Question.of("m", [{"role": "user", "content": [{"type": "text", "text": text}]}], parameters)


def one(client: JudgeClient, question: Question | None = None) -> Reply | RewardError:
    [answer] = client.ask([question or asked()])
    return answer


def readable(question: Question, reply: Reply) -> None:
    """Every reply can be read, and so is cached."""


def text_of(body: dict) -> str:
    return body["messages"][0]["content"][0]["text"]


# What is tried again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "waits"),
    [(error(429, Retry_After="7"), [7.0, 7.0]), (error(503), [0.25, 0.5]), (None, [0.25, 0.5])],
    ids=["busy", "503", "cut"],
)
def test_a_passing_fault_is_tried_again(server, client, time, fault, waits):
    server.behave = lambda body, number: fault if number < 2 else completion("yes")
    asking = client()
    assert one(asking) == Reply(text="yes", finish_reason="stop", prompt_tokens=100, completion_tokens=10)
    assert time.slept == waits
    assert (asking.usage["calls"], asking.usage["retries"], asking.usage["failures"]) == (3, 2, 0)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("fault", [None, error(500)], ids=["cut", "500"])
def test_a_dead_server_costs_few_calls_and_seconds(server, client, time, slots, fault):
    server.behave = lambda body, number: fault
    asking, began = client(max_concurrent=slots, max_retries=10), time.now
    replies = asking.ask([asked(f"question {number}") for number in range(64)])
    assert sum("calls in a row failed" in str(reply) for reply in replies) >= 64 - PROBES
    assert time.now - began <= 10
    assert asking.usage["calls"] <= FAILURES + slots - 1 + PROBES  # those under way meanwhile


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_no_retry_can_help_is_asked_once(server, client, time, status):
    server.behave = lambda body, number: error(status, "the model m is not served here")
    answer = str(one(client()))
    assert f"answered {status}" in answer and "the model m is not served here" in answer
    assert server.paths == ["/v1/chat/completions"] and time.slept == []


@pytest.mark.parametrize("body", ["<html>busy</html>", "[]", '{"choices": [{"message": null}]}'])
def test_a_reply_that_is_no_completion_is_shown(server, client, body):
    server.behave = lambda *_: (200, {}, body)
    assert f"is no chat completion: {body!r}" in str(one(client()))
    assert len(server.bodies) == 1


# Deadlines -----------------------------------------------------------------------------------------------------------


def test_an_item_over_its_deadline_fails(server, client):
    server.behave = lambda *_: server.hold()
    assert "no answer within the deadline of 0.5 s" in str(one(client(deadline=0.5)))


def test_one_call_that_hangs_is_tried_again(server, client):
    def behave(body, number):
        if number == 0:
            server.hold()
        return completion("yes")

    server.behave = behave
    assert one(client(timeout=0.5, max_retries=100)).text == "yes"  # as often as a slow machine may need


def test_max_concurrent_samples_are_asked_at_once(server, picture):
    together, inside, most = threading.Barrier(20, timeout=60), [], []

    def behave(body, number):
        inside.append(number)
        most.append(len(inside))
        together.wait()
        inside.remove(number)
        return completion("Final Score: 3")

    server.behave = behave
    config = {"reward_model": "unified_reward", "api_base_url": server.url, "max_concurrent": 20}
    prompts = [str(number) for number in range(40)]
    assert RewardSet(config)(prompt=prompts, image=[picture] * 40).rewards["default"].tolist() == [3.0] * 40
    assert max(most) <= 20


def test_a_wait_beyond_the_deadline_is_not_begun(server, client, time):
    server.behave = lambda *_: error(429, Retry_After="3600")
    assert "it wants 3600 s more" in str(one(client(deadline=60.0)))
    assert time.slept == []


def test_threads_and_running_loops_can_ask(server, client):
    server.behave = lambda body, number: completion(text_of(body))
    shared = client(max_concurrent=2)

    async def nested(thread: int) -> list[str]:
        return [answer.text for answer in shared.ask([asked(f"{thread} {i}") for i in range(6)])]

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda thread: asyncio.run(nested(thread)), range(4)))
    assert answers == [[f"{thread} {i}" for i in range(6)] for thread in range(4)]


# The circuit ---------------------------------------------------------------------------------------------------------


def test_a_fault_of_seconds_loses_no_sample(server, client):
    server.behave = lambda body, number: error(500) if number < 10 else completion(text_of(body))
    answers = client(max_concurrent=4).ask([asked(str(i)) for i in range(64)])
    assert [answer.text for answer in answers] == [str(i) for i in range(64)]


def test_a_busy_server_is_not_down(server, client):
    server.behave = lambda body, number: error(429) if number < 30 else completion("yes")
    answers = client(max_concurrent=8, max_retries=5).ask([asked(str(i)) for i in range(8)])
    assert [answer.text for answer in answers] == ["yes"] * 8


def test_one_probe_decides_for_all_after_cool_down(server, client, time):
    server.behave = lambda *_: error(500)
    failing = client(max_retries=9, max_concurrent=4)
    failing.ask([asked("a"), asked("b")])
    asked_so_far = len(server.bodies)
    failing.ask([asked("c")])
    assert len(server.bodies) == asked_so_far  # until the cool-down is over

    time.now += 31
    failing.ask([asked(str(i)) for i in range(4)])
    assert len(server.bodies) == asked_so_far + 1  # the probe

    time.now += 31
    server.behave = lambda body, number: completion(text_of(body))
    assert [answer.text for answer in failing.ask([asked(str(i)) for i in range(4)])] == ["0", "1", "2", "3"]


def test_successes_and_refused_items_keep_the_circuit_closed(server, client, time):
    server.behave = lambda body, number: {"bad": error(500), "long": error(400)}.get(text_of(body), completion("yes"))
    mixed = client(max_retries=0, max_concurrent=1)
    for text in ("bad", "long") * FAILURES + ("bad", "good") * FAILURES:
        one(mixed, asked(text))
    assert one(mixed, asked("good")).text == "yes" and time.slept == []


# Replies that cannot be read -----------------------------------------------------------------------------------------


def unreadable(question: Question, reply: Reply) -> None:
    if not reply.text.isdigit():
        raise RewardError("the reply has no score")


def test_a_malformed_reply_is_asked_again_until_readable(server, client):
    server.behave = lambda body, number: completion("it is fine" if number < 2 else "7")
    asking = client(malformed_retries=2)
    [reply] = asking.ask([asked(temperature=0)], unreadable)
    assert reply.text == "7" and asking.usage["malformed"] == 2
    # The likeliest reply is known: it would be the same again.
    assert [body["temperature"] for body in server.bodies] == [0, 0.7, 0.7]


def test_a_reply_that_stays_malformed_is_a_failure(server, client):
    asking = client(malformed_retries=2)
    [failure] = asking.ask([asked()], unreadable)
    assert isinstance(failure, Malformed) and failure.reply.text == "hello"
    assert len(server.bodies) == 3 and asking.usage["failures"] == 1


# The cache -----------------------------------------------------------------------------------------------------------


def test_a_kept_reply_is_not_asked_for_again(server, client):
    caching = client()
    caching.ask([asked("a"), asked("a")], readable)
    assert one(caching, asked("a")).text == "hello"
    assert len(server.bodies) == 1 and caching.usage["cache_hits"] == 1
    for other in (asked("b"), asked("a", temperature=1.0)):
        one(caching, other)
    assert len(server.bodies) == 3


def test_replies_that_are_sampled_are_not_used_twice(server, client):
    sampling = client(temperature=0.5)
    for _ in range(2):
        sampling.ask([asked("a"), asked("a")], readable)
    assert len(server.bodies) == 4 and sampling.usage["cache_hits"] == 0


def test_a_cache_folder_persists_and_heals_broken_files(server, client, tmp_path, caplog):
    client(cache_dir=str(tmp_path)).ask([asked()], readable)
    assert one(client(cache_dir=str(tmp_path))).text == "hello" and len(server.bodies) == 1

    [file] = tmp_path.rglob("*.json")
    file.write_text("half a rep")
    client(cache_dir=str(tmp_path)).ask([asked()], readable)
    assert len(server.bodies) == 2 and "is no reply of a judge" in caplog.text
    assert one(client(cache_dir=str(tmp_path))).text == "hello" and len(server.bodies) == 2


# Keys and addresses --------------------------------------------------------------------------------------------------


def test_the_key_reaches_the_server_and_nobody_else(server, picture, monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    server.behave = lambda body, number: error(401, f"{'x' * 260} {server.headers[number]['authorization']}")
    common = {"reward_model": "unified_reward", "api_base_url": server.url, "on_failure": "mask", "max_retries": 0}
    config = [{"name": "a", "api_key_env": "MY_KEY"}, {"name": "b", "api_key": "sk-secret-2"}]
    rewards = RewardSet([common | reward for reward in config], audit_log=tmp_path / "audit.jsonl")
    with pytest.raises(RewardError, match=r"reward a: .*answered 401") as caught:  # refused for good
        rewards(prompt=["a cat"], image=[picture])
    sent = sorted(headers["authorization"] for headers in server.headers)
    assert sent == ["Bearer sk-secret-1", "Bearer sk-secret-2"]
    told = [(tmp_path / "audit.jsonl").read_text(), caplog.text, str(caught.value)]
    told += [f"{each.arguments!r} {each.model.settings!r} {vars(each.model.client)!r}" for each in rewards.rewards]
    assert "sk-s" not in "".join(told)


def test_a_proxy_is_for_other_machines(server, client, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.invalid")
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        assert one(client(api_base_url=url)).text == "hello"
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    assert one(client(api_base_url="http://judge.invalid/v1")).text == "hello"
    assert server.headers[-1]["host"] == "judge.invalid"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"api_base_url": "localhost:8000/v1"}, "api_base_url .* cannot be used"),
        ({"api_base_url": "http://me:key@host/v1"}, "api_key_env"),
        ({"api_key": "a", "api_key_env": "B"}, "keep api_key_env"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE|no such environment variable"),
        ({"cache_dir": "cache", "temperature": 0.5}, "set temperature to 0 or remove cache_dir"),
    ],
)
def test_settings_that_cannot_work_are_named(judge, settings, said):
    with pytest.raises(ConfigError, match=said):
        judge(**settings)
