"""A worker that computes one batch and has prepared the next: what goes wrong with one costs the other nothing."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from PIL import Image as Pillow

from tests.serving.hosts import until
from tests.serving.sent_media import data_uri, png
from tests.serving.services import Gate, eventually, fake, in_loop, rewards, running
from vlmrm.conversation import Conversation, Image, Message
from vlmrm.errors import MediaError
from vlmrm.modeling import load_processor
from vlmrm.rendering import MediaLimits, Renderer
from vlmrm.serving import gateway, preparing
from vlmrm.serving.preparing import MediaProcesses
from vlmrm.serving.service import Service

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads: pytest's


@asynccontextmanager
async def two_batches(
    folder: Path, second: str
) -> AsyncGenerator[tuple[Service, Gate, Callable[[], Awaitable[list[httpx.Response]]]]]:
    """A worker that computes a batch, at the gate, and prepares that of the prompt `second` meanwhile."""
    log, gate = folder / "log", Gate(folder)
    async with running(fake(engine="fake_reward.Prepared", options={"log": str(log)})) as (service, client):
        first = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        asked = asyncio.create_task(rewards(client, second))
        await eventually(lambda: second in log.read_text())
        assert "computed" not in log.read_text()

        async def answers() -> list[httpx.Response]:
            gate.open()
            return [await first, await asked]

        yield service, gate, answers


def score_of(response: httpx.Response) -> float:
    return response.json()["data"][0]["score"]


@in_loop
async def test_both_batches_of_a_killed_worker_are_recomputed(tmp_path):
    async with two_batches(tmp_path, "second") as (_, gate, answers):
        assert gate.worker is not None
        os.kill(gate.worker, signal.SIGKILL)
        assert [score_of(answer) for answer in await answers()] == [len(gate.prompt), 6]
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines[2::2]) == sorted([gate.prompt, "second"]) and lines[3::2] == ["computed"] * 2, (
        "each came alone, as either may have been to blame"
    )


@pytest.mark.parametrize("what", ["raise", "prepare: raise"])
@in_loop
async def test_a_raising_batch_does_not_disturb_the_earlier(tmp_path, what):
    async with two_batches(tmp_path, what) as (service, gate, answers):
        good, bad = await answers()
        assert score_of(good) == len(gate.prompt)
        assert bad.status_code == 500 and "RuntimeError: out of memory" in bad.json()["error"]["message"]
        assert service.replicas["length"][0].process_id == gate.worker  # the process went on


@in_loop
async def test_what_killed_a_worker_is_retried_alone(tmp_path):
    async with two_batches(tmp_path, "prepare: die") as (_, gate, answers):
        dead = gate.worker
        await eventually(lambda: gate.worker != dead)  # the first batch, again
        assert (tmp_path / "log").read_text().count("die") == 1
        good, bad = await answers()
        assert score_of(good) == len(gate.prompt)
        assert "ended by SIGKILL, for the second time" in bad.json()["error"]["message"]


@in_loop
async def test_a_slow_preparation_holds_nothing_else_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway, "SLOW_PIXELS", 0)
    gate = Gate(tmp_path)
    shown = {"prompt": f"prepare: {gate.prompt}", "image": data_uri(png())}
    async with running(fake(engine="fake_reward.Prepared", options={"log": str(tmp_path / "log")})) as (_, client):
        slow = asyncio.create_task(client.post("/v1/rewards", json={"items": [shown]}))
        await gate.reached()
        assert [score_of(await rewards(client, prompt)) for prompt in ("a", "bb")] == [1, 2]
        gate.open()
        assert score_of(await slow) == len(shown["prompt"])


# The processes that decode and resize media -------------------------------------------------------------------------


class Fragile(Renderer):
    """A renderer whose decoder crashes at files that end with "crash"."""

    def process(self, messages, cache=None):
        [picture] = messages[0].content
        if picture.reference.endswith(b"crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().process(messages, cache)


@pytest.fixture(scope="module")
def renderer(tiny_checkpoint):
    return Fragile(load_processor(tiny_checkpoint), MediaLimits())


@pytest.fixture(autouse=True)
def _small_images_are_sent(monkeypatch):
    monkeypatch.setattr(preparing, "LARGE_PIXELS", 0)


@pytest.fixture
def processes(renderer):
    made = MediaProcesses(2)
    made.start(renderer)
    return made


def shown(colour: str, side: int = 56, more: bytes = b"") -> Conversation:
    file = io.BytesIO()
    Pillow.new("RGB", (side, side), colour).save(file, "PNG")
    return of_file(file.getvalue() + more)


def of_file(content: bytes) -> Conversation:
    return Conversation((Message.of("user", Image(content)), Message.of("assistant", "-")))


def test_media_are_those_of_the_renderer(processes, renderer):
    rows = [shown(colour) for colour in ("red", "green", "blue", "red")]
    checked, media = processes.process(rows)
    assert checked == rows and len(media) == 3
    for row in rows:
        [expected] = renderer.process(row.messages)
        found = media[expected.key]
        assert (found.kind, found.replacement, found.ids) == (expected.kind, expected.replacement, expected.ids)
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(tensor.equal(expected.tensors[name]) for name, tensor in found.tensors.items())


def test_a_picture_crashing_its_process_fails_alone_repeatedly(processes):
    crashing, broken = shown("red", more=b"crash"), of_file(b"no picture")
    for _ in range(2):
        good = [shown(colour) for colour in ("red", "green", "blue")]
        checked, media = processes.process([good[0], crashing, good[1], broken, crashing, good[2]])
        assert [checked[0], checked[2], checked[5]] == good and len(media) == 3
        assert "the process that decoded its image ended" in str(checked[1]) and checked[1] is checked[4]
        assert isinstance(checked[3], MediaError) and "process" not in str(checked[3])


def test_no_process_survives_its_worker(renderer):
    received, sent = os.pipe()
    worker = os.fork()
    if not worker:
        processes = MediaProcesses(1)
        processes.start(renderer)
        processes.process([shown("red")])
        os.write(sent, b"prepared")
        signal.pause()
    os.read(received, 8)
    children = psutil.Process(worker).children(recursive=True)

    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)

    assert children
    until(lambda: not any(map(lives, children)))


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
