"""Services for tests: settings around the fake rewards, the application without a network, or a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn

from vlmrm.serving.app import create_app
from vlmrm.serving.service import Service
from vlmrm.serving.settings import ServiceSettings, validate_settings

HERE = str(Path(__file__).parent)

# Of two services with one queue: one looks ten times a second what is served, and forgets nobody so soon who serves.
ATTENTIVE, TALKATIVE = {"silence": 1.0}, {"silence": 20.0}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an `async def` test, ten minutes at most: the machine may be busy."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 600))

    return run


def fake(name: str = "length", engine: str = "fake_reward.Length", **settings: Any) -> dict[str, Any]:
    """A `[[reward_args]]` block of a fake reward."""
    return {"reward_type": name, "engine": engine, "import_from": [HERE], **settings}


def settings_of(*rewards: dict[str, Any], **settings: Any) -> ServiceSettings:
    """With pulls that wait for their results as long as they can: a worker may take long to load."""
    return validate_settings({"reward_args": list(rewards), "long_poll": 60, **settings}, "test", {})


@asynccontextmanager
async def running(
    *rewards: dict[str, Any], workers: bool = True, **settings: Any
) -> AsyncGenerator[tuple[Service, httpx.AsyncClient]]:
    """A started service and a client of its application."""
    service = Service(settings_of(*(rewards or (fake(),)), **settings), workers=workers)
    app = create_app(service)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield service, client


@contextmanager
def served(*rewards: dict[str, Any], listen: int = 0, **settings: Any) -> Generator[str]:
    """The address of a server with loaded rewards on a port of this machine, for clients that need a network."""
    service = Service(settings_of(*(rewards or (fake(),)), **settings))
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=listen, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not (server.started and all(health.ready for health in map(service.health, service.rewards))):
            assert thread.is_alive(), "the server ended"
            assert not (errors := [error for name in service.rewards for error in service.health(name).errors]), errors
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


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
        while self.worker is None:
            await asyncio.sleep(0.01)

    def open(self) -> None:
        self._path.touch()


async def queued(service: Service, jobs: int, reward: str = "length") -> None:
    """Until so many jobs wait for a worker."""
    while (await service.backend.depth(reward))[0] != jobs:
        await asyncio.sleep(0)


async def rewards(client: httpx.AsyncClient, *prompts: str, **body: Any) -> httpx.Response:
    """The answer to a native request for these prompts."""
    return await client.post("/v1/rewards", json={"items": [{"prompt": prompt} for prompt in prompts], **body})
