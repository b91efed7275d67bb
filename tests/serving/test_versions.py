"""Another model for a reward while it serves: put in place, refused, demanded, rolled back; and its memory freed."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from services import ATTENTIVE, TALKATIVE, Gate, fake, in_loop, queued, running, served

from vlmrm.errors import RewardError
from vlmrm.scoring.remote import AsyncRemoteScorer
from vlmrm.serving.revision import DIGITS

ADMIN = {"Authorization": "Bearer operator"}


def model(folder: Path, name: str, score: float) -> str:
    """A model whose every score is this."""
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_text(str(score))
    return str(folder / name)


@asynccontextmanager
async def serving(folder: Path, replicas: int = 1, **settings: Any):
    """A service of a model with the score 1, and clients of its users and its operator."""
    first = model(folder / "models", "one", 1.0)
    reward = fake("weights", "fake_reward.Weights", model_path=first, replicas=replicas)
    roots = [str(folder / "models"), "org/*"]
    async with running(reward, admin_token="operator", model_roots=roots, **settings) as (service, client):
        if service.replicas["weights"]:
            while service.health("weights").ready < replicas:
                await asyncio.sleep(0.01)
        yield service, client


async def put(client, model: str, **body: Any):
    return await client.put("/v1/rewards/weights/model", json={"model": model, **body}, headers=ADMIN)


async def ask(client, prompt: str = "a", headers: dict[str, str] | None = None):
    return await client.post("/v1/rewards", json={"items": [{"prompt": prompt}]}, headers=headers or {})


def score_of(answer) -> float:
    return answer.json()["data"][0]["score"]


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in its place"])
@in_loop
async def test_a_model_is_changed_and_rolled_back_and_answers_say_which_computed_them(tmp_path, beside):
    async with serving(tmp_path) as (_, client):
        before = await ask(client)
        changed = await put(client, model(tmp_path / "models", "two", 2.0), beside=beside)
        assert changed.status_code == 200, changed.text
        state = changed.json()
        assert state["model"].endswith("two") and state["previous"].endswith("one") and not state["changing"]
        after = await ask(client)
        assert (score_of(before), score_of(after)) == (
            1,
            2,
        )  # the same request: no result of the other model is reused
        for answer in (before, after):
            assert answer.headers["x-vlmrm-revision"] == answer.json()["revision"]
        assert [after.json()["revision"]] == state["revisions"] != [before.json()["revision"]]

        back = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert back.json()["revisions"] == [before.json()["revision"]]
        assert score_of(await ask(client)) == 1
        assert (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json() == back.json()


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in its place"])
@in_loop
async def test_a_model_that_cannot_be_loaded_leaves_the_old_one(tmp_path, beside):
    async with serving(tmp_path) as (_, client):
        broken = model(tmp_path / "models", "broken", 0.0)
        (Path(broken) / "model.safetensors").write_text("no number")
        refused = await put(client, broken, beside=beside)
        assert refused.status_code == 409 and "could not convert string" in refused.text
        assert score_of(await ask(client)) == 1
        assert (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()["previous"] is None


@in_loop
async def test_all_replicas_are_changed_or_none(tmp_path):
    async with serving(tmp_path, replicas=2) as (service, client):
        before = service.health("weights").revisions
        two = model(tmp_path / "models", "two", 2.0)
        first, second = service.replicas["weights"]
        reload = first.reload

        async def reload_and_break(*arguments):
            await reload(*arguments)
            (Path(two) / "model.safetensors").write_text("no number")

        first.reload = reload_and_break
        refused = await put(client, two, beside=False)
        assert refused.status_code == 409 and "could not convert string" in refused.text
        assert service.health("weights").revisions == before and first.ready and second.ready


@in_loop
async def test_a_rollback_to_files_that_have_changed_is_refused(tmp_path):
    async with serving(tmp_path) as (_, client):
        changed = await put(client, model(tmp_path / "models", "two", 2.0), beside=False)
        (tmp_path / "models" / "one" / "model.safetensors").write_text("3")
        refused = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert refused.status_code == 409 and "have changed" in refused.text
        answer = await ask(client)
        assert score_of(answer) == 2 and [answer.json()["revision"]] == changed.json()["revisions"]


@in_loop
async def test_a_rollback_is_to_the_model_whatever_decodes_latents(tmp_path):
    async with serving(tmp_path) as (service, client):
        [replica] = service.replicas["weights"]
        replica.decoder = SimpleNamespace(replica=SimpleNamespace(revision="of the decoder"))
        before = service.health("weights").revisions
        assert (await put(client, model(tmp_path / "models", "two", 2.0))).status_code == 200
        back = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert back.status_code == 200 and back.json()["revisions"] == before


@in_loop
async def test_a_model_whose_predecessor_cannot_be_loaded_is_refused_at_once(tmp_path):
    broken = model(tmp_path / "models", "broken", 0.0)
    (Path(broken) / "model.safetensors").write_text("no number")
    two = model(tmp_path / "models", "two", 2.0)
    reward = fake("weights", "fake_reward.Weights", model_path=broken)
    async with running(reward, admin_token="operator", model_roots=[str(tmp_path)]) as (service, client):
        [replica] = service.replicas["weights"]
        waiting = asyncio.create_task(put(client, two, beside=False))  # before the other is given up
        while replica.error is None:
            await asyncio.sleep(0.01)
        for answer in (await waiting, await put(client, two), await put(client, two, beside=False)):
            assert answer.status_code == 409 and "cannot load its reward" in answer.text


@in_loop
async def test_who_may_change_a_model_and_to_which(tmp_path):
    outside = model(tmp_path, "outside", 3.0)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to(outside)
    async with serving(tmp_path, token="users") as (_, client):
        for token in ("users", "nobody", ""):
            headers = {"Authorization": f"Bearer {token}"}
            for method, path in (("PUT", "model"), ("GET", "model"), ("POST", "sleep"), ("POST", "rollback")):
                answer = await client.request(
                    method, f"/v1/rewards/weights/{path}", headers=headers, json={"model": "x"}
                )
                assert answer.status_code == 401
        assert (await ask(client, headers=ADMIN)).status_code == 401  # it opens nothing else
        for path in (
            outside,
            str(tmp_path / "models" / "link"),
            str(tmp_path / "models" / ".." / "outside"),
            "other/x",
        ):
            refused = await put(client, path)
            assert refused.status_code == 409 and "model_roots" in refused.text and str(tmp_path) not in refused.text
        assert (await client.post("/v1/rewards/weights/rollback", headers=ADMIN)).status_code == 409
        assert (await client.put("/v1/rewards/none/model", json={"model": "x"}, headers=ADMIN)).status_code == 404
    async with running() as (_, client):
        answer = await client.put("/v1/rewards/length/model", json={"model": "x"})
        assert answer.status_code == 403 and "VLMRM_ADMIN_TOKEN" in answer.text


@in_loop
async def test_a_pattern_of_repositories_opens_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "lab", "here", 2.0)
    model(tmp_path, "outside", 3.0)
    reward = fake("weights", "fake_reward.Weights", model_path=model(tmp_path, "one", 1.0))
    async with running(reward, admin_token="operator", model_roots=["lab/*"]) as (_, client):
        for name in ("lab/here", "lab/../outside", "lab/here/../../outside"):
            refused = await put(client, name)
            assert refused.status_code == 409 and "model_roots" in refused.text
        absent = await put(client, "lab/absent")  # is allowed, and cannot be had here
        assert absent.status_code == 409 and "model_roots" not in absent.text


@in_loop
async def test_a_demanded_revision_is_the_one_that_computes_or_nothing_does(tmp_path):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (service, client):
        first = (await ask(client)).json()["revision"]
        demand = {"X-Vlmrm-Revision": first}
        assert score_of(await ask(client, "b", demand)) == 1
        assert (await ask(client, "b", {"X-Vlmrm-Revision": "abc"})).status_code == 400
        wrong = await ask(client, "b", {"X-Vlmrm-Revision": "0" * DIGITS})
        assert wrong.status_code == 409 and first in wrong.text

        held = asyncio.create_task(ask(client, gate.prompt))
        await gate.reached()
        change = asyncio.create_task(put(client, model(tmp_path / "models", "two", 2.0)))
        waiting = [asyncio.create_task(ask(client, "c", headers)) for headers in (demand, {})]
        await queued(service, 2, "weights")  # equal, and yet two jobs: only one of them may be of the other revision
        while not service.replicas["weights"][0]._turns:
            await asyncio.sleep(0.01)
        gate.open()
        late, free = await asyncio.gather(*waiting)
        assert score_of(await held) == 1 and (await change).status_code == 200
        assert late.status_code == 409 and late.json()["error"]["type"] == "NotServed"
        assert score_of(free) == 2


@in_loop
async def test_three_changes_under_load_lose_nothing_and_every_score_is_by_the_revision_it_names(tmp_path):
    models = [model(tmp_path / "models", f"model{number}", float(number)) for number in range(2, 5)]
    async with serving(tmp_path, limits={"result_ttl": 0}) as (service, client):
        scores = {service.health("weights").revisions[0]: 1.0}
        answers, stop = [], asyncio.Event()

        async def load(number: int):
            while not stop.is_set():
                answers.append(await ask(client, f"{number} {len(answers)}"))

        clients = [asyncio.create_task(load(number)) for number in range(4)]
        for number, path in enumerate(models, 2):
            [revision] = (await put(client, path)).json()["revisions"]
            scores[revision] = float(number)
        stop.set()
        await asyncio.gather(*clients)
        assert len(scores) == 4 and {answer.status_code for answer in answers} == {200}
        assert all(score_of(answer) == scores[answer.json()["revision"]] for answer in answers)


@in_loop
async def test_live_traffic_is_scored_by_both_before_the_switch(tmp_path):
    async with serving(tmp_path, limits={"result_ttl": 0}) as (_, client):
        stop = asyncio.Event()

        async def load():
            while not stop.is_set():
                await ask(client)

        traffic = asyncio.create_task(load())
        two = model(tmp_path / "models", "two", 2.0)
        refused = await put(client, two, shadow=3, max_difference=0.5)
        assert refused.status_code == 409 and "differ by 1.0" in refused.text
        assert score_of(await ask(client)) == 1
        changed = (await put(client, two, shadow=3)).json()
        stop.set()
        await traffic
        assert changed["difference"] == {"items": 3, "mean": 1.0, "largest": 1.0, "correlation": None}
        assert score_of(await ask(client)) == 2


@in_loop
async def test_a_reward_that_sleeps_computes_nothing_until_it_is_woken(tmp_path):
    async with serving(tmp_path) as (service, client):
        assert (await client.post("/v1/rewards/weights/sleep", headers=ADMIN)).json()["asleep"]
        assert (await client.get("/ready")).status_code == 503
        asked = asyncio.create_task(ask(client))
        await queued(service, 1, "weights")
        assert not (await client.post("/v1/rewards/weights/wake", headers=ADMIN)).json()["asleep"]
        assert score_of(await asked) == 1  # its weights are there again
        assert (await client.get("/ready")).status_code == 200
    async with running(admin_token="operator") as (service, client):
        while not service.health("length").ready:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/rewards/length/sleep", headers=ADMIN)
        assert refused.status_code == 409 and "no attribute 'sleep'" in refused.text


@in_loop
async def test_processes_that_share_a_queue_follow(redis_server, tmp_path):
    shared = redis_server.settings
    two = model(tmp_path / "models", "two", 2.0)
    async with serving(tmp_path, workers=False, limits=ATTENTIVE, **shared) as (api, client):
        reward = fake("weights", "fake_reward.Weights", model_path=str(tmp_path / "models" / "one"))
        async with running(reward, **shared, limits=TALKATIVE):
            assert score_of(await ask(client)) == 1
            assert (await put(client, two)).status_code == 202  # nothing is proved yet
            while not (await api.backend.load_record("model:weights"))["proved"]:
                await asyncio.sleep(0.01)
            while api.health("weights").info.get("model") != "two":
                await asyncio.sleep(0.01)
            assert score_of(await ask(client)) == 2
        async with running(reward, **shared, limits=TALKATIVE):  # begins with what is wanted, not as configured
            assert score_of(await ask(client, "b")) == 2


@in_loop
async def test_a_model_that_other_processes_refuse_is_neither_served_nor_begun_with(redis_server, tmp_path):
    shared = redis_server.settings
    broken = model(tmp_path / "models", "broken", 0.0)
    (Path(broken) / "model.safetensors").write_text("no number")
    async with serving(tmp_path, workers=False, limits=ATTENTIVE, **shared) as (api, client):
        reward = fake("weights", "fake_reward.Weights", model_path=str(tmp_path / "models" / "one"))
        async with running(reward, **shared, limits=TALKATIVE):
            assert score_of(await ask(client)) == 1
            assert (await put(client, broken)).status_code == 202
            while not api.health("weights").errors:
                await asyncio.sleep(0.01)
            state = (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()
            assert "could not convert string" in state["error"]
            assert score_of(await ask(client, "b")) == 1
        async with running(reward, **shared, limits=TALKATIVE):
            assert score_of(await ask(client, "c")) == 1


@in_loop
async def test_a_remote_scorer_may_demand_a_revision(tiny_reward_model, tmp_path):
    copy = shutil.copytree(tiny_reward_model, tmp_path / "models" / "copy")
    reward = {"reward_type": "vlm_reward", "model_path": str(tiny_reward_model), "device": "cpu"}
    question = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with served(reward, admin_token="operator", model_roots=[str(tmp_path / "models")]) as url:
        async with AsyncRemoteScorer(url) as scorer:
            [score] = await scorer.score([question])
            revision = scorer.digest
        async with AsyncRemoteScorer(url, revision=revision) as scorer:
            assert await scorer.score([question]) == pytest.approx([score], abs=1e-6)
            client = scorer._client
            for path in ("sleep", "wake"):
                assert (await client.post(f"/v1/rewards/vlm_reward/{path}", headers=ADMIN)).status_code == 200
            body = {"model": str(copy)}
            changed = await client.put("/v1/rewards/vlm_reward/model", json=body, headers=ADMIN)
            assert changed.status_code == 200, changed.text
            with pytest.raises(RewardError, match="is not served"):
                await scorer.score([question])
        async with AsyncRemoteScorer(url) as scorer:
            assert await scorer.score([question]) == pytest.approx([score], abs=1e-6)
