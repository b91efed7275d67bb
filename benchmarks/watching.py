"""A process that watches a service: how long its /health takes, and how much memory its processes hold."""

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


@dataclass
class Watch:
    """Milliseconds of each look, and megabytes of each process at each: the service first, then its workers."""

    health: list[float] = field(default_factory=list)
    memory: list[list[float]] = field(default_factory=list)


@contextmanager
def watched(port: int, process: int) -> Generator[Callable[[], Watch]]:
    """Watches the service with this process id; what is yielded ends it and tells what was seen."""
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=watch, args=(theirs, port, process), daemon=True)
    watcher.start()
    theirs.close()  # so that the end of the watcher is the end of what it says
    ours.recv()  # it has looked once

    def ended() -> Watch:
        ours.send(None)
        return ours.recv()

    try:
        yield ended
    finally:
        watcher.terminate()
        watcher.join()


def watch(channel: Connection, port: int, process: int) -> None:
    seen = Watch()
    service = psutil.Process(process)
    processes = [service, *service.children(recursive=True)]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while not seen.memory or not channel.poll(WATCH_S):
        started = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        seen.health.append(1000 * (time.perf_counter() - started))
        assert answer.status == 200, answer.status
        seen.memory.append([one.memory_info().rss / 2**20 for one in processes])
        if len(seen.memory) == 1:
            channel.send(None)
    channel.send(seen)
