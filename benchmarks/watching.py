"""A process that watches a service: the latency of /health, and the memory of its processes."""

from __future__ import annotations

import http.client
import multiprocessing
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil

WATCH_S = 0.1
PATIENCE_S = 10.0  # for an answer


@dataclass
class Watch:
    """Milliseconds of each request, and MB at that time: of the service's own process, and of all others together.

    Requests that were due while one waited count as well, as long as they would have waited: a silence of ten seconds
    is no single slow answer.
    """

    health: list[float] = field(default_factory=list)
    memory: list[list[float]] = field(default_factory=list)


@contextmanager
def watched(port: int, process: int) -> Generator[Callable[[], Watch]]:
    """Watch the service with this process id; yield a function that ends it and returns the Watch."""
    parent, child = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=watch, args=(child, port, process), daemon=True)
    watcher.start()
    child.close()  # so that `recv` raises when the watcher dies
    parent.recv()  # wait for its first measurement

    def ended() -> Watch:
        parent.send(None)
        return parent.recv()

    try:
        yield ended
    finally:
        watcher.terminate()
        watcher.join()


def watch(channel: Connection, port: int, process: int) -> None:
    watch_log = Watch()
    service = psutil.Process(process)
    while not watch_log.memory or not channel.poll(WATCH_S):
        waited = _probe(port)
        watch_log.health += [1000 * (waited - late * WATCH_S) for late in range(int(waited / WATCH_S) + 1)]
        workers = sum(_megabytes(worker) for worker in service.children(recursive=True))
        watch_log.memory.append([_megabytes(service), workers])
        if len(watch_log.memory) == 1:
            channel.send(None)
    channel.send(watch_log)


def _probe(port: int) -> float:
    """Return the seconds until /health has answered, or all patience."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)  # a new one each time, as probes do
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
    except TimeoutError:
        return PATIENCE_S
    finally:
        connection.close()
    return time.perf_counter() - started


def _megabytes(process: psutil.Process) -> float:
    """Return what it holds; 0 once it has ended, as those that parse or prepare do."""
    try:
        return process.memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0
