"""Another model for a reward while it serves: put in place, refused, demanded, rolled back; and its memory freed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from services import ATTENTIVE, Gate, eventually, fake, in_loop, queued, rewards, running, served

from vlmrm import load_scorer
from vlmrm.errors import RewardError
from vlmrm.modeling import write_complete
from vlmrm.scoring.remote import AsyncRemoteScorer
from vlmrm.serving.worker_spec import DIGITS

ADMIN = {"Authorization": "Bearer operator"}


def model(folder: Path, name: str, score: float) -> str:
    """A model whose every score is this."""
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_text(str(score))
    return str(folder / name)


@asynccontextmanager
async def serving(folder: Path, replicas: int = 1, configured: dict[str, Any] | None = None, **settings: Any):
    """A service of a model with the score 1, or as `configured`, and a client."""
    reward = configured or fake(
        "weights", "fake_reward.Weights", model_path=model(folder / "models", "one", 1.0), replicas=replicas
    )
    roots = [str(folder / "models"), "org/*"]
    async with running(reward, admin_token="operator", model_roots=roots, **settings) as (service, client):
        if service.replicas["weights"]:
            await eventually(lambda: service.health("weights").ready >= replicas)
        yield service, client


async def put(client, model: str, **body: Any):
    return await client.put("/v1/rewards/weights/model", json={"model": model, **body}, headers=ADMIN)


async def loading(folder: Path, client, gate: Gate) -> tuple[str, asyncio.Task[Any]]:
    """Begin a change to a model with the score 2; it waits at the gate while it is loaded."""
    two = model(folder / "models", "two", 2.0)
    Path(two, "wait").write_text(gate.prompt)
    change = asyncio.create_task(put(client, two))
    await gate.reached()
    return two, change


async def ask(client, prompt: str = "a", headers: dict[str, str] | None = None):
    return await client.post("/v1/rewards", json={"items": [{"prompt": prompt}]}, headers=headers or {})


def score_of(answer) -> float:
    return answer.json()["data"][0]["score"]


@in_loop
async def test_a_model_is_changed_and_rolled_back_and_answers_say_which_computed_them(tmp_path):
    async with serving(tmp_path) as (_, client):
        before = await ask(client)
        changed = await put(client, model(tmp_path / "models", "two", 2.0))
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
        again = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert again.json()["revisions"] == state["revisions"] and score_of(await ask(client)) == 2


@in_loop
async def test_a_change_that_is_asked_twice_leaves_the_model_before_it_to_roll_back_to(tmp_path):
    async with serving(tmp_path) as (_, client):
        two = model(tmp_path / "models", "two", 2.0)
        for _ in range(2):
            assert (await put(client, two)).json()["previous"].endswith("one")
        back = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert back.json()["model"].endswith("one") and score_of(await ask(client)) == 1


@in_loop
async def test_a_model_that_cannot_be_loaded_leaves_the_old_one(tmp_path):
    async with serving(tmp_path) as (_, client):
        broken = model(tmp_path / "models", "broken", 0.0)
        (Path(broken) / "model.safetensors").write_text("no number")
        refused = await put(client, broken)
        assert refused.status_code == 409 and "could not convert string" in refused.text
        assert score_of(await ask(client)) == 1
        state = (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()
        assert state["previous"] is None and state["model"].endswith("one") and not state["changing"]
        wrong = ({"shadows": 1}, {"beside": False}, {"model": 3}, {"model": ""}, {"max_difference": 0.5})
        for body in wrong:
            assert (await put(client, **{"model": broken, **body})).status_code == 422


@in_loop
async def test_a_model_that_is_written_while_it_is_loaded_is_refused(tmp_path):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (_, client):
        two, change = await loading(tmp_path, client, gate)
        busy = await put(client, two)
        assert busy.status_code == 409 and "is being changed: try again once it is done" in busy.text
        Path(two, "model.safetensors").write_text("3.0")
        gate.open()
        refused = await change
        assert refused.status_code == 409 and "its weights were written meanwhile" in refused.text
        assert score_of(await ask(client)) == 1
        assert (await put(client, two)).status_code == 200 and score_of(await ask(client)) == 3


@pytest.mark.parametrize("which", ["old", "new"])
@in_loop
async def test_a_worker_that_dies_during_a_change_costs_nothing_but_the_change(tmp_path, which):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (service, client):
        _, change = await loading(tmp_path, client, gate)
        os.kill(service.replicas["weights"][0].process_id if which == "old" else gate.worker, signal.SIGKILL)
        assert score_of(await ask(client)) == 1
        gate.open()
        answer = await change
        if which == "old":
            assert answer.status_code == 200 and score_of(await ask(client)) == 2
        else:
            assert answer.status_code == 409 and "ended by SIGKILL" in answer.text
            assert score_of(await ask(client, "b")) == 1


@in_loop
async def test_the_same_folder_is_loaded_again_with_what_it_holds_now(tmp_path):
    async with serving(tmp_path) as (service, client):
        one = service.rewards["weights"].model_path
        assert score_of(await ask(client)) == 1
        Path(one, "model.safetensors").write_text("4.0")
        assert score_of(await ask(client)) == 1  # until it is asked for
        assert (await put(client, one)).status_code == 200
        assert score_of(await ask(client)) == 4


@in_loop
async def test_a_rollback_to_files_that_have_changed_is_refused(tmp_path):
    async with serving(tmp_path) as (_, client):
        changed = await put(client, model(tmp_path / "models", "two", 2.0))
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
async def test_a_model_takes_the_place_of_one_that_cannot_be_loaded(tmp_path):
    broken = model(tmp_path / "models", "broken", 0.0)
    (Path(broken) / "model.safetensors").write_text("no number")
    two = model(tmp_path / "models", "two", 2.0)
    reward = fake("weights", "fake_reward.Weights", model_path=broken)
    async with running(reward, admin_token="operator", model_roots=[str(tmp_path)]) as (service, client):
        await eventually(lambda: service.health("weights").unavailable)
        assert (await ask(client)).status_code == 503
        assert (await put(client, two)).status_code == 200
        assert score_of(await ask(client)) == 2 and (await client.get("/ready")).status_code == 200


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
async def test_a_process_without_workers_changes_nothing(tmp_path):
    async with serving(tmp_path, workers=False) as (_, client):
        two = model(tmp_path / "models", "two", 2.0)
        for refused in (await put(client, two), await client.post("/v1/rewards/weights/sleep", headers=ADMIN)):
            assert refused.status_code == 409 and "no workers in this process: ask one that has" in refused.text
        state = (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()
        assert state["model"].endswith("one") and state["revisions"] == []


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
        await eventually(lambda: service.replicas["weights"][0]._turns)
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
async def test_a_reward_that_sleeps_computes_nothing_until_it_is_woken(tmp_path):
    async with serving(tmp_path) as (service, client):
        assert (await client.post("/v1/rewards/weights/sleep", headers=ADMIN)).json()["asleep"]
        assert (await client.get("/ready")).status_code == 503
        asked = asyncio.create_task(ask(client))
        await queued(service, 1, "weights")
        assert not (await client.post("/v1/rewards/weights/wake", headers=ADMIN)).json()["asleep"]
        assert score_of(await asked) == 1  # its weights are there again
        assert (await client.get("/ready")).status_code == 200


@in_loop
async def test_a_reward_without_a_method_for_it_sleeps_by_its_end(tmp_path):
    async with running(admin_token="operator", limits=ATTENTIVE) as (service, client):
        await eventually(lambda: service.health("length").ready)
        [replica] = service.replicas["length"]
        worker = replica.process_id
        assert (await client.post("/v1/rewards/length/sleep", headers=ADMIN)).json()["asleep"]
        assert not Path(f"/proc/{worker}").exists()
        asked = asyncio.create_task(rewards(client, "aaa"))
        await queued(service, 1)
        assert (await client.post("/v1/rewards/length/wake", headers=ADMIN)).status_code == 200
        assert (await asked).json()["data"][0]["score"] == 3


@in_loop
async def test_another_model_is_put_in_the_place_of_one_that_sleeps(tmp_path):
    async with serving(tmp_path) as (service, client):
        await client.post("/v1/rewards/weights/sleep", headers=ADMIN)
        broken = model(tmp_path / "models", "broken", 0.0)
        Path(broken, "model.safetensors").write_text("no number")
        assert (await put(client, broken)).status_code == 409
        state = (await put(client, model(tmp_path / "models", "two", 2.0))).json()
        assert state["asleep"] and state["model"].endswith("two")
        asked = asyncio.create_task(ask(client))
        await queued(service, 1, "weights")
        await client.post("/v1/rewards/weights/wake", headers=ADMIN)
        assert score_of(await asked) == 2


@in_loop
async def test_a_worker_that_dies_in_its_sleep_takes_no_memory_until_it_is_woken(tmp_path):
    async with serving(tmp_path) as (service, client):
        [replica] = service.replicas["weights"]
        await client.post("/v1/rewards/weights/sleep", headers=ADMIN)
        worker = replica.process_id
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: replica.restarts)
        asked = asyncio.create_task(ask(client))
        await queued(service, 1, "weights")
        assert replica.process_id == worker and not replica.ready and replica.asleep
        assert (await client.post("/v1/rewards/weights/wake", headers=ADMIN)).status_code == 200
        assert score_of(await asked) == 1


@in_loop
async def test_a_change_that_is_under_way_when_the_service_stops_leaves_no_worker(tmp_path):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (_, client):
        _, change = await loading(tmp_path, client, gate)
    assert not Path(f"/proc/{gate.worker}").exists()
    change.cancel()


@in_loop
async def test_what_runs_when_a_reward_shall_sleep_is_finished_first(tmp_path):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (service, client):
        running_job = asyncio.create_task(ask(client, gate.prompt))
        await gate.reached()
        sleep = asyncio.create_task(client.post("/v1/rewards/weights/sleep", headers=ADMIN))
        await eventually(lambda: service.replicas["weights"][0]._turns)
        gate.open()
        assert score_of(await running_job) == 1 and (await sleep).json()["asleep"]


@in_loop
async def test_a_remote_scorer_may_demand_a_revision_of_weights_that_are_updated_in_place(tiny_reward_model, tmp_path):
    folder = shutil.copytree(tiny_reward_model, tmp_path / "model")
    reward = {"reward_type": "vlm_reward", "model_path": str(folder), "device": "cpu"}
    question = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with served(reward, admin_token="operator") as url:
        async with AsyncRemoteScorer(url) as scorer:
            before = await scorer.score([question])
            revision = scorer.digest
        double_scores(folder)
        async with AsyncRemoteScorer(url, revision=revision) as scorer:
            client = scorer.server.client
            client.timeout = 120.0
            for path in ("sleep", "wake"):
                assert (await client.post(f"/v1/rewards/vlm_reward/{path}", headers=ADMIN)).status_code == 200
            assert await scorer.score([question]) == pytest.approx(before, abs=1e-6)
            body = {"model": str(folder)}
            changed = await client.put("/v1/rewards/vlm_reward/model", json=body, headers=ADMIN)
            assert changed.status_code == 200, changed.text
            with pytest.raises(RewardError, match="is not served"):
                await scorer.score([question])
        async with AsyncRemoteScorer(url) as scorer:
            after = await scorer.score([question])
    assert after == pytest.approx(load_scorer(folder, device="cpu").score([question]), abs=1e-5)
    assert after != pytest.approx(before, abs=1e-3)


def double_scores(checkpoint: Path) -> None:
    """Doubles the weights of the head, in the same files."""
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: 2 * value if "score" in name else value for name, value in tensors.items()}, file)
    write_complete(checkpoint, world_size=1, step=0)
