"""Several rewards of one request."""

from __future__ import annotations

from tests.serving.services import fake, in_loop, rewards, running


@in_loop
async def test_the_failure_of_one_reward_spares_the_others():
    leaky = fake("raises", "fake_reward.Leaky", options={"api_key": "s3cret", "folder": "/srv/weights"})
    async with running(fake("one", "fake_reward.Characters"), leaky) as (_, client):
        answer = await rewards(client, "raise", "aaa", models=["one", "raises"])
        alone = (await rewards(client, "raise", "aaa", model="one")).json()
        all_failed = await rewards(client, "raise", models=["raises"])
    found = answer.json()
    assert (answer.status_code, all_failed.status_code, list(found["errors"])) == (200, 500, ["raises"])
    assert {**found["rewards"]["one"], "timing_ms": {}} == {**alone, "timing_ms": {}}
    assert found["errors"]["raises"]["type"] == "RewardFailed" and "/" not in found["errors"]["raises"]["message"]


@in_loop
async def test_several_rewards_are_scored_and_transformed_each_alone():
    async with running(fake("one", "fake_reward.Characters"), fake("two")) as (_, client):
        both = (await rewards(client, "aa", "b", models=["two", "one"], transform="rank")).json()
        for models, status in ((["one", "none"], 404), (["one", "one"], 422), ([], 422)):
            assert (await rewards(client, "a", models=models)).status_code == status, models
        assert (await rewards(client, "a", models=["one"], model="two")).status_code == 422
    assert [[it["raw"] for it in both["rewards"][name]["data"]] for name in ("two", "one")] == [[2, 1], [0.2, 0.1]]
    assert both["errors"] == {}
