"""Large JSON, and what is more than a small body takes: in threads, without harm to others."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from services import fake, in_loop, running

from vlmrm.errors import RowError
from vlmrm.formats.rollouts import read_openrlhf_query
from vlmrm.formats.texts import JSON_VALUES, read_text
from vlmrm.serving import event_loop, strict_json
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.event_loop import RequestContext, begin_request, in_thread
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import LARGE_BYTES, parse

PADDING = " " * LARGE_BYTES
DATA = "data:image/png;base64," + "A" * LARGE_BYTES


@in_loop
async def test_large_json_is_parsed_off_the_loop_as_small_is(monkeypatch):
    value = {"items": [{"image": DATA, "x": [1, 2.5, None, True, 10**30], "é": "ü" * 5000}], "$bytes": {"$dict": {}}}
    threads_of = []
    strict = strict_json.strict_json
    monkeypatch.setattr(
        strict_json, "strict_json", lambda *a: threads_of.append(threading.current_thread()) or strict(*a)
    )
    assert await parse(json.dumps(value).encode(), Limits()) == value
    for broken in ('{"a": 1, "a": 2}', "[NaN]", "[" * 40 + "]" * 40, '"\\ud800"', '{"a": ', '"\xff"'):
        with pytest.raises(InvalidRequest) as small:
            await parse(broken.encode("latin-1"), Limits())
        with pytest.raises(InvalidRequest) as large:
            await parse(PADDING.encode() + broken.encode("latin-1"), Limits())
        assert str(large.value).split(" at line ")[0] == str(small.value).split(" at line ")[0]
    assert [thread is threading.main_thread() for thread in threads_of] == [False, *[True, False] * 6]


@in_loop
async def test_texts_are_bounded_and_media_are_not():
    limits = Limits(max_text_bytes=1000)
    assert await parse(json.dumps({"image": DATA, "raw": "A" * 2000, "prompt": "a b" * 300}).encode(), limits)
    for value in ({"prompt": "a b" * 400}, ["a b" * 200, {"x": ["a b" * 200]}]):
        with pytest.raises(InvalidRequest, match="over the limit max_text_bytes of 1000"):
            await parse(json.dumps([value, DATA]).encode(), limits)


@in_loop
async def test_every_protocol_takes_large_json():
    answers = {}
    async with running(fake("one", "fake_reward.Anything"), limits={"max_text_bytes": 3 * LARGE_BYTES}) as (_, client):
        large, huge = "a b " * (LARGE_BYTES // 4), "a b " * LARGE_BYTES
        for text in (large, huge):
            bodies = {
                "/v1/rewards": json.dumps({"items": [{"prompt": text}]}).encode(),
                "/compute": json.dumps({"prompt": [text]}).encode(),
                "/predict": json.dumps({"inputs": [["a", text]]}).encode(),
                "/api/reward/enqueue": json.dumps({"prompts": [text], "reward_fn": {"one": 1}}).encode() + b"\n",
            }
            headers = {"Content-Type": "application/json"}
            for path, body in bodies.items():
                answers[path, text == huge] = await client.post(path, content=body, headers=headers)
    for (path, refused), answer in answers.items():
        assert answer.status_code < 500 and ("max_text_bytes" in answer.text) == refused, (path, answer.text[:200])


def test_json_within_a_text_has_a_limit_of_values():
    bomb = "[" + "[]," * (JSON_VALUES // 2) + "[]]"
    with pytest.raises(RowError, match=f"over {JSON_VALUES} values"):
        read_text(bomb, (), ())
    with pytest.raises(RowError, match=f"over {JSON_VALUES} values"):
        read_openrlhf_query("a", "ab", '{"prompt": ' + bomb + "}")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/rewards", b'{"items": [' + b"1," * 90_000 + b"1]}", "items has 90001 entries: send 1024 at most"),
        ("/v1/rewards", b'{"items": [' + b"{}," * 60_000 + b"{}]}", "items has 60001 entries: send 1024 at most"),
        (
            "/compute",
            b'{"prompt": ["a"], "video": [[' + b"1," * 90_000 + b"1]]}",
            "video.0.0: Input should be a valid",
        ),
        ("/predict", b'{"inputs": [[' + b"1," * 90_000 + b"1]]}", "inputs.0.0: Input should be a valid string."),
        (
            "/unirl/score",
            b'{"requests": [{"required_rewards": ["one"], "history": [' + b"1," * 90_000 + b"1]}]}",
            "history.0: ",
        ),
        ("/v1/rewards", b'{"items": [], ' + b",".join(b'"%d": 1' % n for n in range(20_000)) + b"}", "20001 keys"),
        ("/v1/rewards", b'{"a": 0, ' + b",".join(b'"%d": 1' % (n % 4000) for n in range(4001)) + b"}", "twice"),
    ],
)
@in_loop
async def test_of_a_small_body_full_of_errors_one_is_told_and_no_other_is_looked_for(path, body, told):
    """To find, describe and count all of them stopped the event loop for up to ten seconds."""
    async with running(fake("one", "fake_reward.Anything"), workers=False) as (_, client):
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert told in answer.text and " more" not in answer.text


@in_loop
async def test_a_column_may_have_as_many_entries_as_items_are_allowed():
    async with running(fake("one", "fake_reward.Anything"), limits={"max_items": 1500}) as (_, client):
        for count, status in ((1500, 200), (1501, 400)):
            answer = await client.post("/score", json={"queries": "aaa", "documents": ["b"] * count})
            assert answer.status_code == status


@in_loop
async def test_a_text_in_the_letters_of_base64_is_a_text_still():
    """In the JSON nobody can tell it from a medium; in an item, where media are bytes, there is no doubt."""
    async with running(fake("one", "fake_reward.Anything"), limits={"max_text_bytes": 1000}) as (_, client):
        for path, body in (
            ("/v1/rewards", {"items": [{"prompt": "a" * 1001}]}),
            ("/compute", {"prompt": ["a" * 1001]}),
        ):
            assert "over the limit max_text_bytes of 1000" in (await client.post(path, json=body)).text
        assert (await client.post("/v1/rewards", json={"items": [{"prompt": "a" * 900}]})).status_code == 200


@in_loop
async def test_two_threads_compute_beside_the_event_loop_and_one_client_has_one_of_them():
    at_once, most, order = [], [], []

    def compute(name: str) -> None:
        at_once.append(name)
        order.append(name)
        most.append(sorted(at_once))
        time.sleep(0.01)
        at_once.remove(name)

    async def ask(client: str, number: int) -> None:
        begin_request(RequestContext(client))
        await in_thread(compute, f"{client}{number}")

    flood = [asyncio.create_task(ask("flood", number)) for number in range(8)]
    await asyncio.sleep(0)
    await asyncio.gather(*flood, *(asyncio.create_task(ask(client, 0)) for client in ("b", "c")))
    assert max(map(len, most)) <= event_loop.THREADS
    assert all(sum(name.startswith("flood") for name in names) <= 1 for names in most)
    assert [name for name in order if name.startswith("flood")] == [f"flood{number}" for number in range(8)]
    assert max(map(order.index, ("b0", "c0"))) <= 4  # of ten, and not behind all of the flood
