"""A conversation has one score, whichever route it takes, or is refused by name."""

from __future__ import annotations

from pathlib import Path

from services import in_loop, running

REWARDS = str(Path(__file__).parents[1] / "rewards")


def boastful(**settings):
    common = {"reward_type": "reward_examples.Boastful", "import_from": [REWARDS], "device": "cpu"}
    return {**common, "name": "boastful", **settings}


@in_loop
async def test_extra_information_is_neither_the_score_nor_the_error():
    async with running(boastful()) as (_, client):
        native = (await client.post("/v1/rewards", json={"items": [{"prompt": "a"}]})).json()["data"][0]
        theirs = (await client.post("/compute", json={"prompt": ["a"]})).json()
    assert (native["score"], native["raw"], native["error"]) == (1.0, 1.0, None)
    assert native["details"]["score"] == 99.0 and native["details"]["error"] == "none"
    assert theirs == {"rewards": [1.0]}
