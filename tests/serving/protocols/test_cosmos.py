"""cosmos-rl's reward service: its trainer works against ours, and what it would lose is said."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid

import httpx2 as httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.serving.hosts import hosts, until
from tests.serving.protocols.cosmos_client import CosmosClient
from tests.serving.sent_media import npy
from tests.serving.services import Gate, eventually, fake, in_loop, running, submit
from vlmrm.conversation import Outcome
from vlmrm.errors import MediaError
from vlmrm.serving.protocols.cosmos import cosmos_scores, read_media
from vlmrm.serving.settings import Limits, RewardSettings

PROMPTS = ["a", "bbb"]
NOISE = np.random.default_rng(0)
IMAGES = NOISE.integers(0, 255, (2, 5, 4, 3), dtype=np.uint8)
VIDEOS = NOISE.integers(0, 255, (2, 3, 6, 5, 4), dtype=np.uint8)
SENT = npy(IMAGES)
LENGTH = {"prompts": PROMPTS, "reward_fn": {"length": 1.0}, "media_type": "image"}


def body(metadata, data=SENT):
    return json.dumps(metadata).encode() + b"\n" + data


async def enqueued(client, metadata=LENGTH, data=SENT, **options):
    return await client.post("/api/reward/enqueue", content=body(metadata, data), **options)


async def pulled(client, ticket, name="length"):
    return await client.post("/api/reward/pull", data={"uuid": ticket, "type": name})


@in_loop
async def test_the_trainer_gets_rewards_in_sample_order():
    async with running() as (_, http):
        client = CosmosClient(http)
        ticket = await client.enqueue(IMAGES, **LENGTH)
        assert (await client.fetch(ticket, "length", "length+length")).tolist() == [2, 6]
    assert client.statuses == [200, 200]  # waited for, not polled for


@in_loop
async def test_the_trainer_polls_until_a_reward_is_computed(tmp_path):
    gate = Gate(tmp_path)
    async with running(long_poll=0) as (_, http):
        client = CosmosClient(http, attempts=10**6)
        ticket = await client.enqueue(IMAGES, **{**LENGTH, "prompts": ["a", gate.prompt]})
        fetching = asyncio.create_task(client.fetch(ticket, "length", "length"))
        await eventually(lambda: 425 in client.statuses)
        gate.open()
        assert (await fetching).tolist() == [1, len(gate.prompt)]
    assert client.statuses[1:] == [*[425] * (len(client.statuses) - 2), 200]


@in_loop
async def test_a_result_has_the_documented_form_and_stays():
    async with running() as (_, client):
        ticket = (await enqueued(client)).json()["uuid"]
        first, again = (await pulled(client, ticket)).json(), (await pulled(client, ticket)).json()
        by_json = await client.post("/api/reward/pull", json={"uuid": ticket})
    assert first == again == by_json.json()
    assert float(first.pop("duration")) >= 0
    least, most = f"{IMAGES.min():.3f}", f"{IMAGES.max():.3f}"
    assert first == {
        "scores": {"length": [1.0, 3.0]},
        "input_info": {"shape": [2, 5, 4, 3], "dtype": "torch.uint8", "min": least, "max": most},
        "decoded_duration": "0.00",
        "type": "length",
    }


@in_loop
async def test_one_request_has_several_rewards_whatever_they_weigh():
    film = {"media_type": "Video", "video_infos": [{"video_fps": 16.0}, {"fps": 8}]}
    metadata = {"prompts": PROMPTS, "reward_fn": {"length": 0, "frames": -2.5}, **film}
    async with running(fake("length"), fake("frames", "fake_reward.Frames")) as (_, client):
        ticket = (await enqueued(client, metadata, npy(VIDEOS))).json()["uuid"]
        length, frames = [(await pulled(client, ticket, name)).json() for name in ("length", "frames")]
    assert length["scores"] == {"length": [1, 3]} and frames["scores"] == {"frames": [6, 6]}
    assert frames["input_info"]["video_infos"] == [{"video_fps": 16.0}, {"fps": 8, "video_fps": 8.0}]


@in_loop
async def test_a_permanent_failure_is_told_at_once():
    async with running() as (_, client):
        metadata = {**LENGTH, "prompts": ["a", "refuse"]}
        item = (await pulled(client, (await enqueued(client, metadata)).json()["uuid"])).json()
        metadata = {**LENGTH, "prompts": ["raise", "b"]}
        whole = (await pulled(client, (await enqueued(client, metadata)).json()["uuid"])).json()
    assert (item["error"], item["scores"], item["state"]) == ("sample 1: it is refused.", None, "failed")
    assert whole["scores"] is None and whole["error"].startswith("it could not be computed: RuntimeError")
    assert {*item} == {"error", "scores", "input_info", "duration", "decoded_duration", "type", "state"}


@in_loop
async def test_newer_clients_tell_queued_and_running_from_unknown(tmp_path):
    gate = Gate(tmp_path)
    async with running(long_poll=0) as (_, client):
        metadata = {**LENGTH, "prompts": [gate.prompt, "a"]}
        running_ = (await enqueued(client, metadata)).json()["uuid"]
        await gate.reached()
        waiting = (await enqueued(client)).json()["uuid"]
        for ticket, state in ((running_, "running"), (waiting, "queued")):
            answer = await pulled(client, ticket)
            assert (answer.status_code, answer.json()["state"]) == (425, state)
            assert answer.json()["message"] == f"Not found scores for {ticket}"
        never = await pulled(client, str(uuid.uuid4()))
        other = await pulled(client, waiting, "clip")
        gate.open()
    assert (never.status_code, never.json()["state"]) == (400, "unknown")
    assert other.status_code == 400 and "it was asked for length" in other.json()["message"]


@pytest.mark.parametrize(
    ("change", "data", "status", "reason"),
    [
        ({"reward_fn": {"lenght": 1}}, SENT, 404, "there is no reward lenght"),
        ({"reward_fn": {"length": "1"}}, SENT, 400, "reward_fn.length"),
        ({"prompts": ["a"]}, SENT, 400, "there are 1 prompts but 2 samples"),
        ({"media_type": "video"}, npy(VIDEOS), 400, "video_infos is missing"),
        ({"media_type": "video", "video_infos": [{}, {}]}, npy(VIDEOS), 400, "video_fps is missing or wrong"),
        ({"geneval_tags": ["colors", "colors"]}, SENT, 400, "go together"),
        ({"geneval_tags": ["a" * 9000, "b"], "geneval_includes": [[], []]}, SENT, 400, "over 4096 for each sample"),
        ({}, npy(VIDEOS), 400, "images are uint8 [2, 3, 6, 5, 4]"),
        ({}, npy(IMAGES / 255), 400, "images are float64"),
        ({}, b"PK\x03\x04" + bytes(30), 400, "which is a pickle and refused"),
        ({}, b"", 400, "what follows the JSON is no tensor"),
        ({"media_type": "latent", "video_infos": [{"fps": 1}] * 2}, npy(VIDEOS), 400, "has no decoder of latents"),
    ],
)
@in_loop
async def test_what_cannot_be_right_is_not_accepted(change, data, status, reason):
    async with running() as (service, client):
        answer = await enqueued(client, {**LENGTH, **change}, data)
        assert await service.backend.depth("length") == (0, 0)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]


@in_loop
async def test_unframed_bodies_and_pulls_without_uuid_are_refused():
    async with running() as (_, client):
        framed = await client.post("/api/reward/enqueue", content=b"{}")
        bare = await client.post("/api/reward/pull", data={"type": "length"})
    assert (framed.status_code, bare.status_code) == (400, 400)
    assert "no line end after its JSON" in framed.json()["error"]["message"]


@in_loop
async def test_a_full_queue_accepts_no_reward_of_requests():
    async with running(fake("one"), fake("two"), workers=False, limits={"queue_items": 3}) as (service, client):
        waiting = await submit(service, "two", [{"prompt": "a"}, {"prompt": "b"}])
        answer = await enqueued(client, {**LENGTH, "reward_fn": {"one": 1, "two": 1}})
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert await service.backend.depth("one") == (0, 0)
        await service.backend.cancel(waiting)


@in_loop
async def test_a_reward_needs_what_its_worker_declares():
    geneval = fake("gen_eval", options={"info": {"required": ["prompt", "image", "metadata"]}})
    dog = {"prompt": "a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}], "media_type": "image"}
    async with running(geneval) as (service, client):
        await eventually(lambda: service.health("gen_eval").ready)
        refused = await enqueued(client, {**LENGTH, "reward_fn": {"gen_eval": 1}})
        accepted = await enqueued(client, {**dog, "reward_fn": {"gen_eval": 1}}, npy(IMAGES[:1]))
    assert (refused.status_code, accepted.status_code) == (400, 200)
    assert "needs geneval_tags and geneval_includes" in refused.json()["error"]["message"]


@in_loop
async def test_ping_answers_anything_and_replicas_are_named(monkeypatch):
    monkeypatch.setenv("LEPTON_REPLICA_ID", "replica-7")
    async with running() as (_, client):
        pings = [
            await client.post("/api/reward/ping", data={"info_data": "{}"}),
            await client.post("/api/reward/pin", content=body(LENGTH)),
        ]
        answer = await enqueued(client)
    assert [(ping.status_code, ping.json()) for ping in pings] == [(200, {"message": "Ping request received"})] * 2
    assert answer.json()["replica_id"] == "replica-7"


@in_loop
async def test_each_reward_is_opened_by_its_own_token():
    one, two = ({"headers": {"Authorization": f"Bearer {name}"}} for name in ("one", "two"))
    clients = [{"name": name, "token": name, "rewards": [name]} for name in ("one", "two")]
    async with running(fake("one"), fake("two"), token="all", clients=clients) as (_, client):
        answers = [await enqueued(client, {**LENGTH, "reward_fn": {"one": 1}}, **given) for given in ({}, two, one)]
        assert [answer.status_code for answer in answers] == [401, 401, 200]
        asked = {"uuid": answers[-1].json()["uuid"]}
        assert (await client.post("/api/reward/pull", json=asked, **two)).status_code == 401
        assert (await client.post("/api/reward/pull", json=asked, **one)).status_code == 200


def told(score, **extra):
    return Outcome(score, extra=extra)


VIDEO_ALIGN = told(-1.0, VQ=1.0, MQ=-3.0, TA=1.0, overall=-1.0)
DOG = {"class": "dog", "count": 2, "color": "red"}
CAT = {"class": "cat", "count": 1, "position": ["left of", 0]}
OTHERS = {task: [-10.0, -10.0] for task in ("single_object", "two_object", "counting", "position", "color_attr")}


REASON = [told(0.9, logits={"yes": 1.0, "no": 2.0}), told(0.2, logits={"yes": 2.0, "no": 1.0})]
REASONED = {"prediction": ["Good", "Bad"], "no_score": [0.9, 0.2], "yes_logit": [1.0, 2.0], "no_logit": [2.0, 1.0]}
ALIGNED = {"vq_reward": [1.0], "mq_reward": [-3.0], "ta_reward": [1.0], "overall_reward": [-1.0]}


@pytest.mark.parametrize(
    ("kind", "outcomes", "expected"),
    [
        ("cosmos_reason1", REASON, REASONED),
        ("dance_grpo", [VIDEO_ALIGN], ALIGNED),
        ("hpsv2", [Outcome(0.25)], {"hpsv2": [0.25]}),
        ("hpsv3", [told(7.5, log_sigma=0.1)], {"hpsv3": [7.5]}),
        ("pickscore", [Outcome(0.9)], {"pickscore": [0.9]}),
        ("image_reward", [Outcome(-2.0)], {"image_reward": [-2.0]}),
        ("ocr", [told(0.5, read="x")], {"ocr_reward": [0.5]}),
        ("unified_reward", [Outcome(4.0)], {"unified_reward": [0.8]}),
        ("vlm_reward", [Outcome(1.5)], {"mine": [1.5]}),
        ("my.Reward", [told(1.5, scores=[3, 4])], {"mine": [1.5]}),  # of no handler
    ],
)
def test_each_reward_has_its_documented_keys(kind, outcomes, expected):
    assert cosmos_scores(RewardSettings(reward_type=kind, name="mine"), outcomes, None) == expected


@pytest.mark.parametrize(
    ("found", "conditions", "graded", "met", "exact"),
    [
        ({"dog": 2, "cat": 1}, [["2 dog", 1], ["red dog", 1], ["1 cat", 1], ["cat left of dog", 1]], 1.0, 1, 1),
        ({"dog": 3, "cat": 1}, [["2 dog", 1], ["red dog", 1], ["1 cat", 1], ["cat left of dog", 1]], 2.5 / 4, 1, 0),
        ({"dog": 2, "cat": 1}, [["2 dog", 1], ["red dog", 0.5], ["1 cat", 1], ["cat left of dog", 0]], 2.5 / 4, 0, 0),
        ({}, [["2 dog", 0], ["red dog", 0], ["1 cat", 0], ["cat left of dog", 0]], 0.0, 0, 0),
    ],
)
def test_geneval_has_three_verdicts_and_one_per_task(found, conditions, graded, met, exact):
    outcome = told(float(met), found=found, conditions=conditions)
    asked = {"tags": ["colors"] * 2, "includes": [[DOG, CAT]] * 2, "only_strict": False}
    reward = RewardSettings(reward_type="gen_eval")
    assert cosmos_scores(reward, [outcome] * 2, asked) == {
        "gen_eval_score": [pytest.approx(graded)] * 2,
        "gen_eval_reward": [met] * 2,
        "gen_eval_strict": [exact] * 2,
        "gen_eval_group": {**OTHERS, "colors": [met] * 2},
    }
    strict = cosmos_scores(reward, [outcome] * 2, {**asked, "only_strict": True})
    assert (strict["gen_eval_reward"], strict["gen_eval_strict"]) == ([0, 0], [exact] * 2)


@pytest.mark.parametrize("sent", [IMAGES, IMAGES.transpose(0, 3, 1, 2), np.asfortranarray(IMAGES)])
def test_pictures_come_out_as_they_went_in(sent):
    media = read_media(npy(sent), "image", Limits())
    np.testing.assert_array_equal(np.stack(media.samples), IMAGES.transpose(0, 3, 1, 2))


def test_videos_come_out_as_they_went_in():
    media = read_media(npy(VIDEOS), "video", Limits())
    np.testing.assert_array_equal(media.samples[1][4], VIDEOS[1, :, 4])


@pytest.mark.parametrize("form", ["float16", "safetensors", "bytes"])
def test_latents_are_read_from_every_form_as_bfloat16(form):
    latents = torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(0)) * 4
    kept = latents.half() if form == "float16" else latents.bfloat16()
    described = kept.bfloat16()
    data = {
        "float16": lambda: npy(kept.numpy()),
        "safetensors": lambda: save({"latents": kept}),
        "bytes": lambda: npy(kept.view(torch.uint8).numpy()),
    }[form]()

    media = read_media(data, "latent", Limits())

    np.testing.assert_array_equal(media.samples[0].astype(np.float32), kept[0].float().numpy())
    span = {"min": f"{described.min():.3f}", "max": f"{described.max():.3f}"}
    assert media.info == {"shape": [1, 16, 2, 3, 4], "dtype": "torch.bfloat16", **span}


@pytest.mark.parametrize(
    ("array", "kind", "limits", "reason"),
    [
        (IMAGES, "image", {"max_pixels": 19}, "4x5 pixels, over the limit of 19"),
        (VIDEOS, "video", {"max_frames": 5}, "6 frames, over the limit of 5"),
        (IMAGES, "image", {"max_items": 1}, "2 samples, over the limit of 1"),
        (np.zeros((1, 16, 3, 2, 2), np.float16), "latent", {"max_frames": 8}, "9 frames, over the limit of 8"),
        (np.zeros((1, 16, 1, 2, 2), np.float16), "latent", {"max_pixels": 255}, "16x16 pixels"),
        (np.full((1, 16, 1, 1, 1), np.nan, np.float16), "latent", {}, "not finite"),
        (VIDEOS, "latent", {}, "send media_type video"),
        (IMAGES[:0], "image", {}, "nothing in it"),
    ],
)
def test_media_over_a_limit_or_mistyped_are_refused(array, kind, limits, reason):
    with pytest.raises(MediaError, match=reason):
        read_media(npy(array), kind, Limits(**limits))


@in_loop
async def test_another_process_sharing_the_queue_serves_the_pull(redis_server):
    shared = redis_server.settings
    async with running(**shared) as (_, first), running(**shared) as (_, second):
        ticket = (await enqueued(first)).json()["uuid"]
        answer = await pulled(second, ticket)
    assert (answer.status_code, answer.json()["scores"]) == (200, {"length": [1, 3]})


def test_enqueued_results_can_be_pulled_until_service_ends(tmp_path):
    gate = Gate(tmp_path)
    asked = {**LENGTH, "prompts": [gate.prompt, "bbb"]}
    with hosts(tmp_path, "", settings={}) as [host], httpx.Client(base_url=host.url, timeout=300) as client:
        ticket = client.post("/api/reward/enqueue", content=body(asked)).json()["uuid"]
        until(lambda: gate.worker is not None)
        host.process.send_signal(signal.SIGTERM)
        until(lambda: "accepted requests are finished first" in host.said.read_text())
        refused = client.post("/api/reward/enqueue", content=body(LENGTH))
        gate.open()
        until(lambda: (tmp_path / "batches").exists())
        pull = {"uuid": ticket, "type": "length"}
        for _ in range(75):  # of 4 s each
            if (answer := client.post("/api/reward/pull", data=pull)).status_code != 425:
                break
        assert host.process.wait(300) == -signal.SIGTERM
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "NotServing")
    assert answer.json()["scores"] == {"length": [len(gate.prompt), 3]}
