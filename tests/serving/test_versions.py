"""Another model for a reward while it serves: put in place, refused, demanded, rolled back; and its memory freed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.serving.services import ATTENTIVE, Gate, eventually, fake, in_loop, queued, rewards, running, served
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
async def test_model_changes_and_rollbacks_show_in_answer_revisions(tmp_path):
    async with serving(tmp_path) as (_, client):
        before = await ask(client)
        state = (await put(client, model(tmp_path / "models", "two", 2.0))).json()
        after = await ask(client)
        back = (await client.post("/v1/rewards/weights/rollback", headers=ADMIN)).json()
        last = await ask(client)
        shown = (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()

    assert [score_of(answer) for answer in (before, after, last)] == [1, 2, 1]  # no result of the other is reused
    assert state["model"].endswith("two") and state["previous"].endswith("one") and not state["changing"]
    assert [after.json()["revision"]] == state["revisions"] != [before.json()["revision"]] == back["revisions"]
    assert after.headers["x-vlmrm-revision"] == after.json()["revision"]
    assert shown == back


@in_loop
async def test_an_unloadable_model_leaves_the_old_one(tmp_path):
    async with serving(tmp_path) as (_, client):
        broken = model(tmp_path / "models", "broken", 0.0)
        (Path(broken) / "model.safetensors").write_text("no number")
        refused = await put(client, broken)
        assert refused.status_code == 409 and "could not convert string" in refused.text
        assert score_of(await ask(client)) == 1
        state = (await client.get("/v1/rewards/weights/model", headers=ADMIN)).json()
        assert state["previous"] is None and state["model"].endswith("one") and not state["changing"]


@in_loop
async def test_a_model_written_while_loading_is_refused(tmp_path):
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
async def test_a_worker_dying_mid_change_costs_nothing_else(tmp_path, which):
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
async def test_a_rollback_to_changed_files_is_refused(tmp_path):
    async with serving(tmp_path) as (_, client):
        changed = await put(client, model(tmp_path / "models", "two", 2.0))
        (tmp_path / "models" / "one" / "model.safetensors").write_text("3")
        refused = await client.post("/v1/rewards/weights/rollback", headers=ADMIN)
        assert refused.status_code == 409 and "have changed" in refused.text
        answer = await ask(client)
        assert score_of(answer) == 2 and [answer.json()["revision"]] == changed.json()["revisions"]


@in_loop
async def test_a_model_replaces_an_unloadable_one(tmp_path):
    broken = model(tmp_path / "models", "broken", 0.0)
    (Path(broken) / "model.safetensors").write_text("no number")
    two = model(tmp_path / "models", "two", 2.0)
    reward = fake("weights", "fake_reward.Weights", model_path=broken)
    async with running(reward, admin_token="operator", model_roots=[str(tmp_path)]) as (service, client):
        await eventually(lambda: service.health("weights").unavailable)
        assert (await ask(client)).status_code == 503
        assert (await put(client, two)).status_code == 200
        assert score_of(await ask(client)) == 2 and (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("token", ["users", "nobody", ""])
@in_loop
async def test_an_operator_alone_may_change_a_model(tmp_path, token):
    async with serving(tmp_path, token="users", workers=False) as (_, client):
        for method, path in (("PUT", "model"), ("GET", "model"), ("POST", "sleep"), ("POST", "rollback")):
            sent = {"headers": {"Authorization": f"Bearer {token}".strip()}, "json": {"model": "x"}}
            assert (await client.request(method, f"/v1/rewards/weights/{path}", **sent)).status_code == 401
        for path in ("/", "/v1/models", "/metrics", "/docs"):  # it opens nothing else
            assert (await client.get(path, headers=ADMIN)).status_code == 401


@in_loop
async def test_without_a_token_of_operators_nobody_may(tmp_path):
    async with running(workers=False) as (_, client):
        answer = await client.put("/v1/rewards/length/model", json={"model": "x"})
    assert answer.status_code == 403 and "VLMRM_ADMIN_TOKEN" in answer.text


@in_loop
async def test_a_model_must_lie_in_allowed_folders(tmp_path):
    outside = model(tmp_path, "outside", 3.0)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to(outside)
    async with serving(tmp_path) as (_, client):
        for path in (outside, f"{tmp_path}/models/link", f"{tmp_path}/models/../outside", "other/x", "org/../outside"):
            refused = await put(client, path)
            assert refused.status_code == 409 and "model_roots" in refused.text and str(tmp_path) not in refused.text
        assert (await client.post("/v1/rewards/weights/rollback", headers=ADMIN)).status_code == 409
        assert (await client.put("/v1/rewards/none/model", json={"model": "x"}, headers=ADMIN)).status_code == 404


@in_loop
async def test_a_demanded_revision_computes_or_nothing_does(tmp_path):
    gate = Gate(tmp_path)
    async with serving(tmp_path) as (_, client):
        first = (await ask(client)).json()["revision"]
        demand = {"X-Vlmrm-Revision": first}
        assert score_of(await ask(client, "b", demand)) == 1
        assert (await ask(client, "b", {"X-Vlmrm-Revision": "abc"})).status_code == 400
        assert (await ask(client, "b", {"X-Vlmrm-Revision": "0" * DIGITS})).status_code == 409

        _, change = await loading(tmp_path, client, gate)
        gate.open()
        assert (await change).status_code == 200
        late, free = await ask(client, "c", demand), await ask(client, "c")
        assert late.status_code == 409 and late.json()["error"]["type"] == "NotServed"
        assert score_of(free) == 2


@in_loop
async def test_changes_under_load_keep_scores_true_to_revisions(tmp_path):
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
async def test_a_sleeping_reward_computes_nothing_until_woken(tmp_path):
    async with serving(tmp_path) as (service, client):
        assert (await client.post("/v1/rewards/weights/sleep", headers=ADMIN)).json()["asleep"]
        assert (await client.get("/ready")).status_code == 503
        asked = asyncio.create_task(ask(client))
        await queued(service, 1, "weights")
        assert not (await client.post("/v1/rewards/weights/wake", headers=ADMIN)).json()["asleep"]
        assert score_of(await asked) == 1  # its weights are there again
        assert (await client.get("/ready")).status_code == 200


@in_loop
async def test_a_reward_without_sleep_method_ends_its_worker(tmp_path):
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
async def test_a_remote_scorer_may_demand_a_weight_revision(tiny_reward_model, tmp_path):
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
