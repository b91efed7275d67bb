"""The clients of cosmos-rl itself, as published, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.serving.hosts import until
from tests.serving.services import Gate, fake, served

HERE = Path(__file__).parent
COSMOS = HERE.parents[2] / ".cache" / "neighbours" / "cosmos"
BRIGHT = fake("bright", "fake_reward.Brightness")
FRAMES = fake("frames", "fake_reward.Frames")
PULL_S = 4  # as a service's is: these clients read for 5 s, and then ask again


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Has one of the clients ask a server for rewards."""
    if not (COSMOS / ".installed").exists():
        pytest.skip("cosmos-rl is not there: run `make neighbours`, or .ci/run")
    folder = tmp_path_factory.mktemp("cosmos")
    answers, theirs = os.pipe()
    with (folder / "said").open("w") as said:
        trainer = subprocess.Popen(
            [COSMOS / "bin" / "python", str(HERE / "cosmos_trainer.py"), str(theirs)],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=[theirs],
            text=True,
        )
    os.close(theirs)
    lines = os.fdopen(answers)

    def asked(**what):
        print(json.dumps(what), file=trainer.stdin, flush=True)
        return json.loads(lines.readline())

    try:
        assert lines.readline(), (folder / "said").read_text()[-2000:]
        yield asked
    finally:
        trainer.kill()
        trainer.wait()
        lines.close()


def images(ask, url, *reward_fns, **options):
    """Rewards of two prompts' images, 0, 255 and 51 bright, 102 and 153."""
    pictures = {"a": [0.0, 1.0, 0.2], "bbb": [0.4, 0.6]}
    return ask(client="trainer", url=url, reward_fns=reward_fns, **{"token": "", "pictures": pictures, **options})


@pytest.mark.parametrize("batch_size", [1, 48])  # a request for each prompt; one for both
def test_the_trainer_gets_weighted_reward_sums_by_image(ask, batch_size):
    with served(BRIGHT, fake(), token="s3cret", long_poll=PULL_S) as url:
        fns = [{"name": "bright", "weight": 0.5, "clip_max": 120}, {"name": "length", "weight": -1}]
        answer = images(ask, url, *fns, token="s3cret", batch_size=batch_size)
    assert answer["rewards"] == {"a": [-1, 59, 24.5], "bbb": [48, 57]}
    assert [sum(advantages) for advantages in answer["advantages"].values()] == pytest.approx([0, 0], abs=1e-6)


def test_the_trainer_waits_longer_than_one_pull(ask, tmp_path):
    gate = Gate(tmp_path)
    with served(fake(), long_poll=0) as url, ThreadPoolExecutor(1) as thread:
        asking = thread.submit(images, ask, url, {"name": "length"}, pictures={gate.prompt: [0.0, 1.0]})
        try:
            until(lambda: 'route="/api/reward/pull",status="425"' in httpx.get(f"{url}/metrics", timeout=300).text)
        finally:
            gate.open()
        assert asking.result()["rewards"] == {gate.prompt: [len(gate.prompt)] * 2}


def test_hopeless_requests_are_refused_at_once(ask):
    """`get_results` has no better word for a reward that it cannot have than an IndexError."""
    with served(fake(), fake("frames", "fake_reward.Frames"), token="s3cret") as url:
        assert images(ask, url, {"name": "length"})["error"].startswith("HTTPError: 401")
        assert images(ask, url, {"name": "lenght"}, token="s3cret")["error"].startswith("HTTPError: 404")
        assert images(ask, url, {"name": "frames"}, token="s3cret")["error"].startswith("IndexError")


def test_videos_come_as_latents_from_either_client(ask, vae_folder):
    rewards = [FRAMES, BRIGHT, fake("dance_grpo", "fake_reward.ThreeQualities")]
    with served(*rewards, decode_args={"model_path": vae_folder, "dtype": "float32"}, long_poll=PULL_S) as url:
        shown = {"token": "", "pictures": {"a": [0.1, 0.9], "bbb": [0.5]}, "vae": vae_folder, "frames": 9}
        fns = [{"name": "frames"}, {"name": "dance_grpo", "score_key": "vq_reward+ta_reward"}]
        new = ask(client="trainer", url=url, reward_fns=fns, **shown)
        shown["pictures"] = {"a": [0.1], "bbb": [0.5]}
        old = ask(client="older", url=url, reward={"reward_clip_max": 99}, **shown)
    assert new["rewards"] == {"a": [18.5, 18.5], "bbb": [18.5]}
    assert old["rewards"] == [9 + 1 + 0.5, 9 + 3 + 0.5]
