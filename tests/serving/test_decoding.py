"""Latents become the video that their autoencoder makes of them, once, before a reward sees them."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch

from tests.serving.sent_media import npy
from tests.serving.services import ATTENTIVE, TALKATIVE, eventually, fake, in_loop, running, submit
from vlmrm.errors import CheckpointError
from vlmrm.serving.engines import WanDecoder

diffusers = pytest.importorskip("diffusers")


def latents_of(seed=0, shape=(16, 2, 3, 4)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_video_equals_what_the_autoencoder_decodes(vae_folder):
    decoder = WanDecoder(vae_folder, dtype="float32", device="cpu")
    latents = latents_of()
    [outcome] = decoder([{"latents": npy(latents)}])
    video = np.load(io.BytesIO(outcome["extra"]["video"]))

    vae = diffusers.AutoencoderKLWan.from_pretrained(vae_folder).eval()
    of = vae.config
    raw = torch.stack([torch.from_numpy(latents[c]) * of.latents_std[c] + of.latents_mean[c] for c in range(16)])
    with torch.no_grad():
        expected = vae.decode(raw[None]).sample[0]  # [3, T, H, W] in [-1, 1]
    expected = ((expected + 1) / 2 * 255).numpy().astype(np.uint8).transpose(1, 0, 2, 3)
    assert video.shape == (5, 3, 24, 32) and video.dtype == np.uint8
    assert video.std() > 10
    assert np.abs(video.astype(int) - expected).max() <= 1  # what is just below a whole number may be at it
    assert decoder.info == {"kind": "latents", "channels": 16, "spatial": 8, "temporal": 4}


def test_undecodable_latents_are_told_apart(vae_folder):
    decoder = WanDecoder(vae_folder, dtype="float32", device="cpu")
    broken = latents_of()
    broken[0, 0, 0, 0] = np.inf
    given = latents_of(shape=(48, 1, 2, 2)), broken, latents_of(shape=(16, 1, 1, 1))
    wrong, infinite, good = decoder([{"latents": npy(one)} for one in given])
    assert wrong == {"error": "its latents are [48, 1, 2, 2], and the decoder's are [16, T, H, W]"}
    assert infinite == {"error": "its latents have values that are not finite"}
    assert np.load(io.BytesIO(good["extra"]["video"])).shape == (1, 3, 8, 8)


def test_a_folder_without_an_autoencoder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no AutoencoderKLWan in"):
        WanDecoder(str(tmp_path))


SHOWN = ("ready", "workers", "errors")


def decode_args(**options):
    """`[decode_args]`; what it decodes is in float32."""
    return {"model_path": "", "dtype": "float32", **options}


def sent(tensor, **metadata):
    """The body of an enqueue of one sample."""
    asked = {"prompts": ["a"], "reward_fn": {"length": 1.0}, "video_infos": [{"video_fps": 16.0}], **metadata}
    return json.dumps(asked).encode() + b"\n" + npy(tensor)


@in_loop
async def test_rewards_get_videos_and_each_is_decoded_once(vae_folder):
    rewards = [fake("frames", "fake_reward.Frames"), fake("frames too", "fake_reward.Frames")]
    async with running(*rewards, decode_args=decode_args(model_path=vae_folder)) as (service, _):
        items = [
            {"prompt": "a", "latents": {"npy": npy(latents_of(shape=(16, 2, 1, 2)))}},
            {"prompt": "a", "latents": {"npy": npy(latents_of(shape=(4, 1, 1, 1)))}},
            {"prompt": "a", "video": {"npy": npy(np.zeros((7, 3, 8, 8), np.uint8))}},
        ]
        found = []
        for name in ("frames", "frames too"):
            status = await service.backend.wait(await submit(service, name, items), 600)
            found.append(status.outcomes)
    first, second = found
    assert [one.score for one in first] == [5, None, 7]
    assert first[1].error.startswith("its latents are [4, 1, 1, 1]")
    assert first[0].decode_seconds > 0 and first[2].decode_seconds == 0
    assert second[0].decode_seconds == first[0].decode_seconds  # the video was still there


@in_loop
async def test_a_decoder_that_cannot_load_leaves_images_served(tmp_path, redis_server):
    arguments = decode_args(venv_python=str(tmp_path / "python"))
    shared = {"decode_args": arguments, **redis_server.settings}
    api_process = running(workers=False, **shared, limits=ATTENTIVE)
    async with api_process as (api, client), running(**shared, limits=TALKATIVE) as (_, worker):
        await eventually(lambda: api.health("length").ready and api.state.decoder.failing)
        for one in (client, worker):
            ready = await one.get("/ready")
            decoder = (await one.get("/v1/status")).json()["decoder"]
            assert ready.status_code == 200 and ready.json()["decoder"] == {key: decoder[key] for key in SHOWN}
            assert (decoder["ready"], decoder["workers"]) == (0, 1)
            assert "cannot be started: python" in decoder["errors"][0]  # and not where that is
            latents = await one.post("/api/reward/enqueue", content=sent(latents_of(shape=(1, 16, 1, 1, 1))))
            assert latents.status_code == 503 and "see /ready" in latents.json()["error"]["message"]
            pixels = np.zeros((1, 4, 5, 3), np.uint8)
            assert (await one.post("/api/reward/enqueue", content=sent(pixels, media_type="image"))).status_code == 200
