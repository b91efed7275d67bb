"""Fixtures of the service's tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from tests.serving.redis_server import RedisServer
from tests.serving.services import LONGEST_S, Hangs


@pytest.fixture(autouse=True)
def _deadline() -> Generator[None]:
    """Ends a test that reads or waits for ever, there where it does, which its traceback shows."""

    def end(*_: Any) -> None:
        raise Hangs(f"a test has not ended in {2 * LONGEST_S:g} s: it waits here")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 2 * LONGEST_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory) -> Generator[RedisServer]:
    """One for all tests that leave it as it is."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.end()


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory) -> str:
    """A tiny AutoencoderKLWan with the figures of Wan 2.1: 16 channels, 4 times in time and 8 in space."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(base_dim=2, num_res_blocks=1)
    with torch.no_grad():  # untrained, its output is next to constant
        vae.decoder.conv_out.weight.mul_(40)
    folder = tmp_path_factory.mktemp("wan")
    vae.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start_redis(tmp_path) -> Generator[Callable[..., RedisServer]]:
    """Starts one of the test's own, with options of its configuration."""
    started = []

    def start(*options: str, **settings: Any) -> RedisServer:
        started.append(RedisServer(tmp_path, *options, **settings))
        return started[-1]

    yield start
    for server in started:
        server.end()
