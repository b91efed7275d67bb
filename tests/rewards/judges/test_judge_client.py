"""Asking a judge's server: what is tried again, deadlines, threads and loops, the circuit, the cache, keys."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from time import sleep

import pytest
from judge_server import completion, error

from vlmrm.errors import ConfigError, RewardError
from vlmrm.http import Unavailable, current_loop
from vlmrm.rewards import RewardSet
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.client import JudgeClient, JudgeSettings, Malformed
from vlmrm.rewards.judges.replies import Question, Reply
from vlmrm.rewards.registry import identity
from vlmrm.rewards.servers import FAILURES, FIRST_PAUSE, PROBES, CircuitBreaker


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


def cached(client: JudgeClient, question: Question | None = None) -> Reply | RewardError:
    [answer] = client.ask([question or asked()], readable)
    return answer


def text_of(body: dict) -> str:
    return body["messages"][0]["content"][0]["text"]


# What is tried again -------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_when_it_says_so(server, client, time):
    server.behave = lambda body, number: error(429, Retry_After="7") if number < 2 else completion("yes")
    busy = client()
    assert one(busy) == Reply(text="yes", finish_reason="stop", prompt_tokens=100, completion_tokens=10)
    assert time.slept == [7.0, 7.0]
    assert (busy.usage.calls, busy.usage.retries, busy.usage.failures) == (3, 2, 0)


@pytest.mark.parametrize("status", [408, 409, 500, 503])
def test_a_passing_fault_is_tried_again_after_waits_that_double(server, client, time, status):
    server.behave = lambda body, number: error(status) if number < 2 else completion("yes")
    assert one(client()).text == "yes"
    assert time.slept == [0.25, 0.5]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_dead_server_costs_a_round_ten_seconds_however_few_calls_it_makes_at_once(server, client, time, slots):
    server.behave = lambda body, number: None
    asking, began = client(max_concurrent=slots, max_retries=10), time.now
    replies = asking.ask([asked(f"question {number}") for number in range(64)])
    assert all("cannot be reached" in str(reply) or "not asked" in str(reply) for reply in replies)
    assert time.now - began <= 10
    assert asking.usage.calls <= FAILURES + slots - 1 + PROBES  # those under way meanwhile


def test_an_outage_is_one_line_in_the_log(server, client, caplog):
    server.behave = lambda body, number: error(503, "loading") if number in (0, 1, 3) else completion("yes")
    asking = client()
    with caplog.at_level("WARNING", "vlmrm"):
        asking.ask([asked("one")])
        asking.ask([asked("two")])
    [line] = caplog.messages
    assert line == f"{server.url}/chat/completions answered 503: loading: asking again in 0.25 s"


def test_a_cut_connection_is_tried_again(server, client):
    server.behave = lambda body, number: None if number == 0 else completion("yes")
    assert one(client()).text == "yes"


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_no_retry_can_help_is_asked_once_and_the_server_s_words_are_kept(server, client, time, status):
    server.behave = lambda body, number: error(status, "the model m is not served here")
    answer = one(client())
    assert f"/chat/completions answered {status}" in str(answer) and "the model m is not served here" in str(answer)
    assert len(server.bodies) == 1 and time.slept == []


def test_tries_come_to_an_end(server, client):
    server.behave = lambda body, number: error(500, "out of memory")
    failing = client(max_retries=2)
    assert "answered 500" in str(one(failing))
    assert (len(server.bodies), failing.usage.retries, failing.usage.failures) == (3, 2, 1)


def test_a_server_that_is_not_there_is_an_error_with_its_address(client, time):
    answer = one(client(api_base_url="http://127.0.0.1:9/v1", max_retries=1))
    assert "the judge m at http://127.0.0.1:9/v1: /chat/completions cannot be reached" in str(answer)
    assert len(time.slept) == 1


@pytest.mark.parametrize("body", ["<html>busy</html>", "[]", '{"choices": []}', '{"choices": [{"message": null}]}'])
def test_what_is_no_completion_is_an_error_that_shows_it(server, client, body):
    server.behave = lambda *_: (200, {}, body)
    assert f"is no chat completion: {body!r}" in str(one(client()))
    assert len(server.bodies) == 1


# Deadlines -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pass_on_the_loop(monkeypatch):
    """Moves the clock of the judges' loop on by some seconds; called on that loop."""
    loop, ahead = current_loop(), 0.0
    now = loop.time

    def passing(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(loop, "time", lambda: now() + ahead)
    return passing


def test_an_item_over_its_deadline_fails_and_the_others_do_not(server, client, pass_on_the_loop):
    def behave(body, number):
        if text_of(body) == "slow":
            server.hold()
        return completion("yes")

    server.behave = behave
    asking = client(deadline=60.0)
    count = asking.usage.add

    def counted(**counts):
        count(**counts)
        if "prompt_tokens" in counts:  # the fast one has its answer
            pass_on_the_loop(61.0)

    asking.usage.add = counted
    fast, slow = asking.ask([asked("fast"), asked("slow")])
    assert fast.text == "yes"
    assert "no answer within the deadline of 60 s" in str(slow)


def test_one_call_that_hangs_is_tried_again(server, client):
    def behave(body, number):
        if number == 0:
            server.hold()
        return completion("yes")

    server.behave = behave
    assert one(client(timeout=0.5, max_retries=100)).text == "yes"  # as often as a slow machine may need


def test_an_answer_that_drips_in_is_late_all_the_same(client):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(2**16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        answer = one(client(api_base_url=url, timeout=0.3, max_retries=0))
    assert "did not answer in 0.3 s" in str(answer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_deadline_of_the_configuration_is_the_judge_s(server, asynchronous):
    config = {"reward_model": "unified_reward", "api_base_url": server.url, "async_reward": asynchronous}
    [reward] = RewardSet({**config, "deadline": 30.0}).rewards
    assert reward.model.settings.deadline == 30.0
    assert reward.arguments.deadline == (30.0 if asynchronous else None)


def test_as_many_samples_as_max_concurrent_are_with_the_server_at_once(server, picture):
    together = threading.Barrier(20, timeout=60)
    server.behave = lambda body, number: (together.wait(), completion("Final Score: 3"))[1]
    config = {"reward_model": "unified_reward", "api_base_url": server.url, "max_concurrent": 20}
    prompts = [str(number) for number in range(20)]
    assert RewardSet(config)(prompt=prompts, image=[picture] * 20).rewards["default"].tolist() == [3.0] * 20


def test_a_wait_beyond_the_deadline_is_not_begun(server, client, time):
    server.behave = lambda *_: error(429, Retry_After="3600")
    assert "asked once, and it wants 3600 s more" in str(one(client(deadline=60.0)))
    assert time.slept == []


# Threads and loops ---------------------------------------------------------------------------------------------------


def test_items_are_with_the_server_together_and_never_too_many(server, client):
    together, inside, most = threading.Barrier(3), [], []

    def behave(body, number):
        inside.append(number)
        most.append(len(inside))
        together.wait(60)
        inside.remove(number)
        return completion(text_of(body))

    server.behave = behave
    answers = client(max_concurrent=3).ask([asked(str(i)) for i in range(12)])
    assert [answer.text for answer in answers] == [str(i) for i in range(12)]
    assert max(most) <= 3


def test_every_thread_and_every_batch_can_ask_also_from_within_a_running_loop(server, client):
    server.behave = lambda body, number: completion(text_of(body))
    shared = client(max_concurrent=2)
    answers: dict[int, list[str]] = {}

    def ask(thread: int) -> None:
        for batch in range(2):
            found = shared.ask([asked(f"{thread} {batch} {i}") for i in range(6)])
            answers.setdefault(thread, []).extend(answer.text for answer in found)

    async def nested() -> None:
        ask(2)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    asyncio.run(nested())
    for thread in threads:
        thread.join()
    assert answers == {t: [f"{t} {batch} {i}" for batch in range(2) for i in range(6)] for t in range(3)}


def test_a_forked_process_asks_by_itself(server, client):
    forked = client()
    one(forked)
    child = os.fork()
    if child == 0:
        os._exit(7 if one(forked, asked("again")).text == "hello" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# The circuit ---------------------------------------------------------------------------------------------------------


def test_a_judge_that_is_down_costs_a_round_of_64_samples_few_calls_and_seconds(server, client, time):
    """Calls decide, and the seconds that it means to wait."""
    server.behave = lambda *_: error(500, "out of memory")
    failing = client()  # the defaults: 8 at a time, up to 6 calls of each
    answers = failing.ask([asked(str(i)) for i in range(64)])
    # Eight in a row, seven that were under way meanwhile, and the probes.
    assert len(server.bodies) == failing.usage.calls <= 8 + 7 + PROBES
    assert all("out of memory" in str(answer) for answer in answers)
    assert sum("calls in a row failed" in str(answer) for answer in answers) >= 64 - PROBES
    pauses = [FIRST_PAUSE * 2**number for number in range(PROBES)]
    assert [pause for pause in pauses if pause in time.slept] == pauses and sum(pauses) < 10

    calls = len(server.bodies)
    failing.ask([asked(str(i)) for i in range(64)])
    assert len(server.bodies) == calls  # the next round costs none, until the cool-down is over
    time.now += 31
    failing.ask([asked(str(i)) for i in range(64)])
    assert len(server.bodies) == calls + 1


def test_a_fault_of_seconds_loses_no_sample(server, client):
    server.behave = lambda body, number: error(500) if number < 10 else completion(text_of(body))
    answers = client(max_concurrent=4).ask([asked(str(i)) for i in range(64)])
    assert [answer.text for answer in answers] == [str(i) for i in range(64)]


@pytest.mark.parametrize("headers", [{}, {"Retry_After": "1"}])
def test_a_busy_server_is_not_down(server, client, headers):
    server.behave = lambda body, number: error(429, **headers) if number < 30 else completion("yes")
    answers = client(max_concurrent=8, max_retries=5).ask([asked(str(i)) for i in range(8)])
    assert [answer.text for answer in answers] == ["yes"] * 8


def test_after_the_cool_down_one_probe_decides_for_all_that_wait(server, client, time):
    server.behave = lambda *_: error(500)
    failing = client(max_retries=9, max_concurrent=4)
    failing.ask([asked("a"), asked("b")])
    asked_so_far = len(server.bodies)

    time.now += 31
    failing.ask([asked(str(i)) for i in range(4)])
    assert len(server.bodies) == asked_so_far + 1  # the probe

    time.now += 31
    server.behave = lambda body, number: completion(text_of(body))
    assert [answer.text for answer in failing.ask([asked(str(i)) for i in range(4)])] == ["0", "1", "2", "3"]


def test_a_probe_that_is_cancelled_leaves_its_place_to_the_next(time):
    async def down(probe: bool) -> None:
        raise Unavailable("it is down")

    async def held(probe: bool) -> None:
        await asyncio.Event().wait()

    async def told(probe: bool) -> bool:
        return probe

    async def scenario() -> bool:
        circuit = CircuitBreaker()
        for _ in range(FAILURES):
            with pytest.raises(Unavailable):
                await circuit.call(down)
        first = asyncio.ensure_future(circuit.call(held))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(circuit.call(told))
        await asyncio.sleep(0)
        first.cancel()
        return await waiting

    assert asyncio.run(scenario()) is True


def test_successes_and_refused_items_keep_the_circuit_closed(server, client, time):
    server.behave = lambda body, number: {"bad": error(500), "long": error(400)}.get(text_of(body), completion("yes"))
    mixed = client(max_retries=0, max_concurrent=1)
    for text in ("bad", "long", "bad", "good", "bad") * FAILURES:
        one(mixed, asked(text))
    assert one(mixed, asked("good")).text == "yes" and time.slept == []


# Replies that cannot be read -----------------------------------------------------------------------------------------


def unreadable(question: Question, reply: Reply) -> None:
    if not reply.text.isdigit():
        raise RewardError("the reply has no score")


def test_a_malformed_reply_is_asked_for_again_and_the_readable_one_is_used(server, client):
    server.behave = lambda body, number: completion("it is fine" if number < 2 else "7")
    asking = client(malformed_retries=2)
    [reply] = asking.ask([asked(temperature=0)], unreadable)
    assert reply.text == "7" and asking.usage.malformed == 2
    # The likeliest reply is known: it would be the same again.
    assert [body["temperature"] for body in server.bodies] == [0, 0.7, 0.7]


def test_a_reply_that_stays_malformed_is_a_failure_that_holds_it(server, client):
    asking = client(malformed_retries=2)
    [failure] = asking.ask([asked()], unreadable)
    assert isinstance(failure, Malformed) and failure.reply.text == "hello" and "has no score" in str(failure)
    assert len(server.bodies) == 3 and asking.usage.failures == 1


def test_malformed_replies_do_not_outlast_the_round_s_deadline(server, client, pass_on_the_loop):
    server.behave = lambda *_: completion("fine")
    asking = client(malformed_retries=1000, deadline=60.0)

    def check(question, reply):
        pass_on_the_loop(25.0)
        unreadable(question, reply)

    [failure] = asking.ask([asked()], check)
    assert "no answer within the deadline of 60 s" in str(failure) and len(server.bodies) <= 4


# The cache -----------------------------------------------------------------------------------------------------------


def test_a_reply_that_was_kept_is_not_asked_for_again(server, client):
    caching = client()
    cached(caching, asked("a"))
    assert one(caching, asked("a")).text == "hello"
    assert len(server.bodies) == 1 and caching.usage.cache_hits == 1
    for other in (asked("b"), asked("a", temperature=1.0)):
        one(caching, other)
    assert len(server.bodies) == 3


def test_equal_questions_of_one_batch_are_asked_once(server, client):
    assert [answer.text for answer in client().ask([asked("a"), asked("a")])] == ["hello", "hello"]
    assert len(server.bodies) == 1


def test_replies_that_are_sampled_are_not_used_twice(server, client):
    sampling = client(temperature=0.5)
    for _ in range(2):
        sampling.ask([asked("a"), asked("a")], readable)
    assert len(server.bodies) == 4 and sampling.usage.cache_hits == 0


@pytest.mark.parametrize(("reward", "given"), [("vllm_evaluate", {"temperature": 0.5}), ("rational_rewards_t2i", {})])
def test_a_folder_for_replies_that_are_sampled_is_refused(tmp_path, reward, given):
    settings = {"vlm_model": "m", "cache_dir": str(tmp_path), **given}
    with pytest.raises(ConfigError, match="set temperature to 0 or remove cache_dir"):
        RewardSet({"rewards": [{"name": "judge", "reward_model": reward, "device": "cpu", **settings}]})


def test_the_one_unused_for_longest_leaves_memory_first(server, client):
    small = client(max_cache_size=2)
    for text in ("a", "b", "a", "c"):
        cached(small, asked(text))
    assert small.usage.cache_hits == 1
    kept = [small.cache.get(asked(text).key) is not None for text in ("a", "b", "c")]
    assert kept == [True, False, True]


def test_a_folder_outlives_the_process_and_heals_a_broken_file(server, client, tmp_path, caplog):
    first = client(cache_dir=str(tmp_path))
    cached(first)
    assert one(client(cache_dir=str(tmp_path))).text == "hello" and len(server.bodies) == 1

    [file] = tmp_path.rglob("*.json")
    file.write_text("half a rep")
    healed = client(cache_dir=str(tmp_path))
    cached(healed)
    assert len(server.bodies) == 2 and "is no reply of a judge" in caplog.text
    assert one(client(cache_dir=str(tmp_path))).text == "hello" and len(server.bodies) == 2


def test_a_folder_that_fails_costs_no_reply(server, client, tmp_path, caplog):
    failing = client(cache_dir=str(tmp_path / "cache"))
    (tmp_path / "cache" / asked().key[:2]).write_text("a file where a folder should be")
    cached(failing)
    assert one(failing).text == "hello" and len(server.bodies) == 1
    assert caplog.text.count("replies are kept in memory alone from now on") == 1
    with pytest.raises(ConfigError, match=r"cache_dir .* cannot be written"):
        client(cache_dir=str(tmp_path / "cache" / asked().key[:2]))


# Structured replies --------------------------------------------------------------------------------------------------


def test_a_server_that_refuses_response_format_is_asked_without_and_it_is_said_once(server, client, caplog):
    server.behave = lambda body, number: error(400, "unknown field") if "response_format" in body else completion("ok")
    structured = {"response_format": {"type": "json_schema"}}
    refusing = client()
    assert [one(refusing, asked(str(i), **structured)).text for i in range(3)] == ["ok"] * 3
    assert ["response_format" in body for body in server.bodies] == [True, False, False, False]
    assert caplog.text.count("does not take response_format") == 1


def test_an_item_that_is_refused_either_way_does_not_blame_response_format(server, client):
    server.behave = lambda body, number: error(400, "too long") if text_of(body) == "long" else completion("ok")
    taking = client()
    structured = {"response_format": {"type": "json_schema"}}
    assert "too long" in str(one(taking, asked("long", **structured)))
    one(taking, asked("short", **structured))
    assert "response_format" in server.bodies[-1]


# Keys, addresses, cost -----------------------------------------------------------------------------------------------


def test_the_key_reaches_the_server_and_nobody_else(server, picture, monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    server.behave = lambda body, number: error(401, f"{'x' * 260} {server.headers[number]['authorization']}")
    config = [
        {
            "name": name,
            "reward_model": "unified_reward",
            "api_base_url": server.url,
            "on_failure": "mask",
            "max_retries": 0,
            **key,
        }
        for name, key in {"a": {"api_key_env": "MY_KEY"}, "b": {"api_key": "sk-secret-2"}}.items()
    ]
    rewards = RewardSet(config, audit_log=tmp_path / "audit.jsonl")
    with pytest.raises(RewardError, match=r"reward a: .*answered 401") as caught:  # refused for good
        rewards(prompt=["a cat"], image=[picture])
    sent = sorted(headers["authorization"] for headers in server.headers)
    assert sent == ["Bearer sk-secret-1", "Bearer sk-secret-2"]
    told = [(tmp_path / "audit.jsonl").read_text(), caplog.text, str(caught.value)]
    told += [f"{each.arguments!r} {each.model.settings!r} {vars(each.model.client)!r}" for each in rewards.rewards]
    assert "sk-s" not in "".join(told)


def test_two_keys_are_two_models():
    keys = ("one", "two", "one")
    one, two, again = (RewardArguments(reward_model="unified_reward", extra_kwargs={"api_key": key}) for key in keys)
    assert identity(one) == identity(again) != identity(two)


def test_a_proxy_is_for_other_machines(server, client, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        assert one(client(api_base_url=url)).text == "hello"
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    assert one(client(api_base_url="http://judge.invalid/v1")).text == "hello"
    assert server.headers[-1]["host"] == "judge.invalid"


def test_tokens_are_counted_and_priced(server, client):
    priced = client(prompt_price=2.0, completion_price=10.0)
    priced.ask([asked("a"), asked("b")])
    assert (priced.usage.prompt_tokens, priced.usage.completion_tokens) == (200, 20)
    assert priced.usage.cost == pytest.approx((200 * 2 + 20 * 10) / 1e6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_concurrent": 0}, "max_concurrent: Input should be greater than or equal to 1"),
        ({"timeout": "60"}, "timeout: Input should be a valid number"),
        ({"api_base_url": "localhost:8000/v1"}, "api_base_url .* cannot be used: write http://host:port"),
        ({"api_base_url": "http://me:key@host/v1"}, "give the key by api_key_env"),
        ({"api_key": "a", "api_key_env": "B"}, "keep api_key_env"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "there is no such environment variable"),
    ],
)
def test_settings_that_cannot_work_are_named(judge, settings, said):
    with pytest.raises(ConfigError, match=said):
        judge(**settings)


def test_a_setting_that_is_missing_is_asked_for(judge):
    with pytest.raises(ConfigError, match="reward it: rubric is missing"):
        judge("rubric", vlm_model="m")
