"""Large JSON, long texts and long lists: bounded, and refused in one sentence."""

from __future__ import annotations

import json

import pytest

from tests.serving.services import fake, in_loop, running
from vlmrm.errors import RowError
from vlmrm.formats.rollouts import read_openrlhf_query
from vlmrm.formats.texts import JSON_VALUES, read_text
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import strict_json

LARGE_BYTES = 256 * 2**10
DATA = "data:image/png;base64," + "A" * LARGE_BYTES


def test_texts_are_bounded_and_media_are_not():
    limits = Limits(max_text_bytes=1000)
    assert strict_json(json.dumps({"image": DATA, "raw": "A" * 2000, "prompt": "a b" * 300}).encode(), limits)
    for value in ({"prompt": "a b" * 400}, ["a b" * 200, {"x": ["a b" * 200]}]):
        with pytest.raises(InvalidRequest, match="over the limit max_text_bytes of 1000"):
            strict_json(json.dumps([value, DATA]).encode(), limits)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rewards", lambda text: json.dumps({"items": [{"prompt": text}]})),
        ("/compute", lambda text: json.dumps({"prompt": [text]})),
        ("/predict", lambda text: json.dumps({"inputs": [["a", text]]})),
        ("/api/reward/enqueue", lambda text: json.dumps({"prompts": [text], "reward_fn": {"one": 1}}) + "\n"),
    ],
)
@in_loop
async def test_every_protocol_takes_large_texts_up_to_limits(path, body):
    limits, headers = {"max_text_bytes": 3 * LARGE_BYTES}, {"Content-Type": "application/json"}
    async with running(fake("one", "fake_reward.Anything"), limits=limits) as (_, client):
        for length, refused in ((LARGE_BYTES // 4, False), (LARGE_BYTES, True)):
            answer = await client.post(path, content=body("a b " * length).encode(), headers=headers)
            assert answer.status_code < 500 and ("max_text_bytes" in answer.text) == refused, answer.text[:200]


def test_json_within_a_text_has_a_value_limit():
    bomb = "[" + "[]," * (JSON_VALUES // 2) + "[]]"
    with pytest.raises(RowError, match=f"over {JSON_VALUES} values"):
        read_text(bomb, (), ())
    with pytest.raises(RowError, match=f"over {JSON_VALUES} values"):
        read_openrlhf_query("a", "ab", '{"prompt": ' + bomb + "}")


@in_loop
async def test_a_column_may_have_max_items_entries():
    async with running(fake("one", "fake_reward.Anything"), limits={"max_items": 1500}) as (_, client):
        for count, status in ((1500, 200), (1501, 400)):
            answer = await client.post("/score", json={"queries": "aaa", "documents": ["b"] * count})
            assert answer.status_code == status
