"""API processes and worker hosts as `vlmrm serve` starts them, with one fake reward."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.serving.redis_server import reserved
from tests.serving.services import HERE

ROOT = Path(HERE).parents[1]


class Host:
    """One process of `serve ROLE`; of `serve` where that is "".

    `url` is where it answers; `kill`, `stop` (SIGSTOP) and `go_on` are what may happen to it.
    """

    def __init__(self, role: str, config: Path, **popen: Any):
        self.role, self.config, self._holder, self._popen = role, config, reserved(), popen
        self.port = self._holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = ["-c", "from vlmrm.cli import main; main()", "serve", *self.role.split(), "--config", str(self.config)]
        self.said = self.config.with_name(f"serve{self.role}-{self.port}.said")
        self.process = subprocess.Popen(
            [sys.executable, *words, "--port", str(self.port)],
            cwd=self.config.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=self.said.open("w"),
            **self._popen,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.go_on()
        self.kill()
        self._holder.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def worker(self) -> int:
        """The process of its worker, as it says."""
        return int(re.findall(r"is ready \(process (\d+)\)", self.said.read_text())[-1])

    def until_ready(self) -> None:
        until(lambda: _status(self.url + "/ready") == 200, lambda: self.said.read_text())


@contextmanager
def hosts(
    folder: Path, *roles: str, settings: dict[str, Any], silence: float = 20.0, **reward: Any
) -> Generator[list[Host]]:
    """Ready hosts that share one Redis, or one without.

    The fake reward writes the prompts of each batch to `folder / "batches"`.
    """
    tables = {"": settings, "[limits]": {"silence": silence}}
    tables["[[reward_args]]"] = {
        "reward_type": "length",
        "engine": "fake_reward.Length",
        "import_from": [HERE],
        **reward,
    }
    tables["[reward_args.options]"] = {"log": str(folder / "batches")}
    config = folder / "service.toml"
    config.write_text("\n".join(line for name, table in tables.items() for line in (name, *_lines(table))))
    started = [Host(role, config) for role in roles]
    try:
        for host in started:
            host.until_ready()
        yield started
    finally:
        for host in started:
            host.end()


def _lines(table: dict[str, Any]) -> list[str]:
    return [f"{name} = {value!r}" for name, value in table.items()]


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=60).status_code
    except httpx.TransportError:
        return 0


def until(holds: Callable[[], bool], tell: Callable[[], object] = lambda: "it did not come") -> None:
    """Waits until something holds, five minutes at most: the machine may be busy."""
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end, tell()
        time.sleep(0.02)


def scored_batches(folder: Path) -> list[list[str]]:
    """The prompts of each batch that a worker has begun."""
    path = folder / "batches"
    return [line.split("|") for line in path.read_text().splitlines()] if path.exists() else []


async def ask(client: httpx.AsyncClient, url: str, prompt: str) -> dict[str, Any]:
    """The answer to one prompt, asked for again as clients do: when there is no service, or it says to come later."""
    body = {"items": [{"prompt": prompt}]}
    while True:
        with suppress(httpx.TransportError):
            answer = await client.post(url + "/v1/rewards", json=body)
            if answer.status_code not in (503, 504):
                return answer.json()
        await asyncio.sleep(0.05)


def score_of(answer: dict[str, Any]) -> float:
    assert "data" in answer, answer
    return answer["data"][0]["score"]
