"""Services for tests: settings around the fake rewards, the application without a network, or a real server."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests import preloaded
from vlmrm.serving.app import create_app
from vlmrm.serving.backend import Job
from vlmrm.serving.front import Front, Handler
from vlmrm.serving.handler import FrontLink
from vlmrm.serving.http_server import listening
from vlmrm.serving.service import Service
from vlmrm.serving.settings import ServiceSettings, validate_settings

HERE = str(Path(__file__).parent)

# Of two services with one queue: one looks ten times a second what is served, and forgets nobody so soon who serves.
ATTENTIVE, TALKATIVE = {"silence": 1.0}, {"silence": 20.0}
LONGEST_S = 300.0  # of a wait: the machine may be busy


class Hangs(AssertionError):
    """A test that has not ended in `LONGEST_S`."""


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an `async def` test, `LONGEST_S` at most; then says at which of its lines it waits."""

    async def bounded(*args: Any, **kwargs: Any) -> None:
        running = asyncio.create_task(test(*args, **kwargs))
        await asyncio.wait({running}, timeout=LONGEST_S)
        if not running.done():
            [frame] = running.get_stack(limit=1)
            running.cancel()
            waits = inspect.getframeinfo(frame)
            raise Hangs(f"{waits.filename}:{waits.lineno} waits: {''.join(waits.code_context or ()).strip()}")
        running.result()

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        runner = asyncio.Runner()
        try:
            runner.run(bounded(*args, **kwargs))
        except Hangs:
            raise  # what does not end by itself would not end for the runner either
        except BaseException:
            runner.close()
            raise
        runner.close()

    return run


async def eventually(holds: Callable[[], Any], tell: Callable[[], object] | None = None) -> None:
    """Waits until something holds, or what it returns does; after `LONGEST_S` it says what was waited for."""
    end = time.monotonic() + LONGEST_S
    for tries in itertools.count():
        held = holds()
        if await held if inspect.isawaitable(held) else held:
            return
        assert time.monotonic() < end, tell() if tell is not None else f"in vain: {inspect.getsource(holds).strip()}"
        await asyncio.sleep(0 if tries < 100 else 0.01)  # what is a few rounds of the loop away is not missed


def fake(name: str = "length", engine: str = "fake_reward.Length", **settings: Any) -> dict[str, Any]:
    """A `[[reward_args]]` block of a fake reward."""
    return {"reward_type": name, "engine": engine, "import_from": [HERE], **settings}


def settings_of(*rewards: dict[str, Any], **settings: Any) -> ServiceSettings:
    """With pulls that wait for their results as long as they can: a worker may take long to load."""
    settings = {"reward_args": [preloading(reward) for reward in rewards], "long_poll": 60, **settings}
    if "decode_args" in settings:
        settings["decode_args"] = preloading(settings["decode_args"])
    return validate_settings(settings, "test", {})


def preloading(block: dict[str, Any]) -> dict[str, Any]:
    """Let a worker of ours be forked from a process that has torch; those of fakes need none."""
    light = block.get("engine", "").startswith("fake_reward.")
    return block if light else {"venv_python": preloaded.python(), **block}


class Willing(Handler):
    """A handler that always has room."""

    working: Any = property(lambda self: None, lambda self, number: None)


@asynccontextmanager
async def serving(service: Service, listen: int = 0) -> AsyncGenerator[tuple[Front, str]]:
    """A started service, its front and its handler in this loop: the front, and its address."""
    front, loop = Front(service.settings), asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    await loop.create_unix_connection(partial(Willing, front), sock=ours)
    await loop.create_unix_connection(partial(FrontLink, create_app(service.settings, service)), sock=theirs)
    await service.start()
    try:
        with socket.create_server(("127.0.0.1", listen)) as listener:
            async with listening(front, listener):
                yield front, f"http://127.0.0.1:{listener.getsockname()[1]}"
                await service.drain(30)
            await front.drain()
    finally:
        await service.stop()


@asynccontextmanager
async def running(
    *rewards: dict[str, Any], workers: bool = True, **settings: Any
) -> AsyncGenerator[tuple[Service, httpx.AsyncClient]]:
    """A started service and a client of it."""
    service = Service(settings_of(*(rewards or (fake(),)), **settings), workers=workers)
    async with serving(service) as (_, url), httpx.AsyncClient(base_url=url, timeout=LONGEST_S) as client:
        yield service, client


@contextmanager
def served(*rewards: dict[str, Any], listen: int = 0, **settings: Any) -> Generator[str]:
    """The address of a service with loaded rewards in a thread of its own, for clients that block."""
    service = Service(settings_of(*(rewards or (fake(),)), **settings))
    addresses, ended = queue.SimpleQueue[str](), threading.Event()

    async def serve() -> None:
        async with serving(service, listen) as (_, url):
            await eventually(lambda: all(service.health(name).ready for name in service.rewards))
            addresses.put(url)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        yield addresses.get(timeout=LONGEST_S)
    finally:
        ended.set()
        thread.join(LONGEST_S)
        assert not thread.is_alive(), "the server did not end"


class Gate:
    """Keeps a worker in the batch that has `prompt` in it, from when it is `reached` until the test opens it.

    So a test knows what a worker does, however fast the machine is.
    """

    def __init__(self, folder: Path):
        self._path = folder / "gate"
        self.prompt = f"wait {self._path}"

    @property
    def worker(self) -> int | None:
        """The process that came to it last; None before one has."""
        said = self._path.with_suffix(".reached")
        number = said.read_text() if said.exists() else ""
        return int(number) if number else None

    async def reached(self) -> None:
        await eventually(lambda: self.worker is not None, lambda: f"no worker came to {self.prompt}")

    def open(self) -> None:
        self._path.touch()


async def queued(service: Service, jobs: int, reward: str = "length") -> None:
    """Until so many jobs wait for a worker."""

    async def waits() -> bool:
        return (await service.backend.depth(reward))[0] == jobs

    await eventually(waits, lambda: f"there were never {jobs} jobs of {reward} in the queue")


async def submit(service: Service, reward: str, items: list[Any]) -> str:
    """The id of the job of items that a reward has accepted."""
    return await service.put(Job.of(reward, items))


async def rewards(client: httpx.AsyncClient, *prompts: str, **body: Any) -> httpx.Response:
    """The answer to a native request for these prompts."""
    return await client.post("/v1/rewards", json={"items": [{"prompt": prompt} for prompt in prompts], **body})
