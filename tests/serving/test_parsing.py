"""Large JSON, long texts and long lists: bounded, and refused in one sentence."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from PIL import Image

from tests.serving.services import fake, in_loop, running
from vlmrm.data.media import png_of
from vlmrm.errors import RowError
from vlmrm.formats.rollouts import read_openrlhf_query
from vlmrm.formats.texts import JSON_VALUES, read_text
from vlmrm.serving.media import write_npy

LARGE_BYTES = 256 * 2**10
IMAGE = {"reward_fn": {"one": 1}, "media_type": "image"}
ARRAY = write_npy(np.zeros((1, 4, 4, 3), np.uint8)).decode("latin-1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rewards", lambda text: json.dumps({"items": [{"prompt": text}]})),
        ("/compute", lambda text: json.dumps({"prompt": [text]})),
        ("/predict", lambda text: json.dumps({"inputs": [["a", text]]})),
        ("/api/reward/enqueue", lambda text: json.dumps({"prompts": [text], **IMAGE}) + "\n" + ARRAY),
    ],
)
@in_loop
async def test_every_protocol_takes_large_texts_up_to_limits(path, body):
    limits, headers = {"max_text_bytes": 3 * LARGE_BYTES}, {"Content-Type": "application/json"}
    async with running(fake("one", "fake_reward.Anything"), limits=limits) as (_, client):
        for length, refused in ((LARGE_BYTES // 4, False), (LARGE_BYTES, True)):
            answer = await client.post(
                path, content=body("abcd" * length).encode("latin-1"), headers=headers
            )  # as base64 may be
            assert answer.status_code < 500 and ("max_text_bytes" in answer.text) == refused, answer.text[:200]


@in_loop
async def test_media_are_no_texts():
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    picture = f"data:image/png;base64,{base64.b64encode(png_of(Image.fromarray(noise))).decode()}"
    async with running(fake("one", "fake_reward.Anything"), limits={"max_text_bytes": 1000}) as (_, client):
        answer = await client.post("/v1/rewards", json={"items": [{"prompt": "a", "image": picture}]})
        assert len(picture) > 10_000 and answer.status_code == 200, answer.text[:200]


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
