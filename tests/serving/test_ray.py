"""Workers on the nodes of a Ray cluster: the same service, which a node that dies costs no request."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from tests.serving.services import eventually, fake, in_loop, rewards, running
from vlmrm.errors import ConfigError
from vlmrm.serving.settings import validate_settings

pytestmark = pytest.mark.alone  # an actor of an earlier cluster, forgotten late, ends one of this with its number

STORE = {"object_store_memory": 80 * 2**20}
PLACE = {"engine": "ray", "limits": {"silence": 20.0}}


@pytest.fixture(scope="module")
def cluster() -> Generator[Any]:
    """A cluster on this machine: a head without CPUs, and two nodes with one each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # this machine may be full of others' memory
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE})
        made.nodes = [made.add_node(num_cpus=1, **STORE) for _ in range(2)]
        yield made
        ray.shutdown()
        made.shutdown()


async def ready(service: Any, count: int) -> None:
    def all_of_them() -> bool:
        assert not (errors := service.health("length").errors), errors
        return service.health("length").ready == count

    await eventually(all_of_them)


@in_loop
async def test_a_dying_node_under_load_loses_no_request(cluster, tmp_path):
    log = tmp_path / "batches"
    block = fake(replicas=2, options={"log": str(log)}, batch_tokens=200)
    async with running(block, ray_address=cluster.address, **PLACE) as (service, client):
        await ready(service, 2)
        prompts = [f"{number:03d}" + "x" * (number % 50) for number in range(300)]
        gate = asyncio.Semaphore(16)

        async def ask(prompt: str) -> Any:
            async with gate:
                return await rewards(client, prompt)

        asked = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        await asyncio.wait(asked[:40])
        cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * len(prompts)
        scores = [answer.json()["data"][0]["score"] for answer in answers]
        assert scores == [float(len(prompt)) for prompt in prompts]
        # The others' scores may come before Ray says that it is gone.
        await eventually(lambda: service.health("length").restarts)
        cluster.nodes.append(cluster.add_node(num_cpus=1, **STORE))
        # Where Ray has a place again; until the new node answers, it may be in vain.
        await eventually(lambda: service.health("length").ready == 2)


@in_loop
async def test_a_cluster_worker_behaves_like_a_local_one(cluster, tmp_path):
    blocks = [
        fake(num_cpus=0.5),
        fake("environment", "fake_reward.Environment", num_cpus=0.25, runtime_env={"env_vars": {"OF_ITS_OWN": "1"}}),
    ]
    async with running(*blocks, ray_address=cluster.address, **PLACE) as (service, client):
        large = "x" * 12_000_000  # more than one call of the actor carries
        answers = [await rewards(client, *prompts, model="length") for prompts in (["a"], [large, "bb"], ["refuse"])]
        scores = [[item["score"] for item in answer.json()["data"]] for answer in answers]
        assert scores == [[1.0], [12_000_000.0, 2.0], [None]]
        assert (await rewards(client, "raise", model="length")).status_code == 500
        died = await rewards(client, f"die once {tmp_path / 'died'}", model="length")
        assert died.json()["data"][0]["score"] == 1.0 and service.health("length").restarts == 1
        answer = await rewards(client, "OF_ITS_OWN", "VLMRM_TOKEN", model="environment")
        assert [item["score"] for item in answer.json()["data"]] == [1.0, 0.0]
    import ray

    # What the service had is free.
    await eventually(lambda: ray.available_resources().get("CPU", 0) >= ray.cluster_resources()["CPU"])


def test_settings_that_ray_cannot_use_are_named():
    for settings, block, what in (
        ({"engine": "ray"}, {"devices": ["cuda:0"]}, "has devices: leave it out, Ray chooses"),
        ({}, {"num_gpus": 0.5}, 'has num_gpus: leave it out, it is for engine = "ray"'),
    ):
        with pytest.raises(ConfigError, match=what):
            validate_settings({**settings, "reward_args": [fake(**block)]}, "test", {})
