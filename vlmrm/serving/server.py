"""The process that listens: uvicorn, with one line when it is ready and an end at once on a second signal."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from vlmrm.errors import ConfigError
from vlmrm.private_names import relies_on
from vlmrm.serving.connection import GuardedConnection

logger = logging.getLogger("vlmrm")

relies_on(uvicorn.Server, overridden=("startup", "handle_exit", "shutdown"), attributes=("should_exit",))

BACKLOG = 2048
FINISH_S = 60  # for what was accepted when the service is told to stop
# Clients' pools keep connections for up to a minute; whoever closes first should be the client.
KEEP_ALIVE_S = 75
COLLECT_AT = (700, 10, 10_000)  # new objects, such collections, and those of all that is not old (10 by default)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: when the address is not this machine's, or the port is in use or privileged.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {host} cannot be resolved ({error.strerror}): use 127.0.0.1 or 0.0.0.0.") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: f"port {port} of {host} is in use: choose another with --port, or 0 for any free one.",
            errno.EACCES: f"port {port} is reserved for root: choose one from 1024 on with --port.",
            errno.EADDRNOTAVAIL: f"host {host} is no address of this machine: use 127.0.0.1 or 0.0.0.0.",
        }
        otherwise = f"{host}:{port} cannot be listened at ({error.strerror}): choose another host or port."
        raise ConfigError(reasons.get(error.errno or 0, otherwise)) from error
    listener.listen(BACKLOG)
    return listener


def run(app: FastAPI, listener: socket.socket, names: str) -> None:
    """Serves `app` until SIGTERM or Ctrl-C; what was accepted is then finished, unless there comes a second one."""
    config = uvicorn.Config(
        app,
        http=GuardedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FINISH_S,
    )
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").handlers = logger.handlers
    drain = partial(app.state.serving.service.drain, fetched=True)
    Server(config, f"Serving {names} on {_url(listener)}", drain).run(sockets=[listener])


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def spare_full_collections() -> None:
    """Has Python's collector look at old objects rarely: with thousands of requests that is half a second of nothing.

    Nearly all garbage of a request is freed without it, or when it is young.
    """
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECT_AT)


class Server(uvicorn.Server):
    """uvicorn's server; `ready` is logged once it answers.

    Args:
        drain: waits, so many seconds at most, until what was accepted is finished and fetched; the port is open still.
    """

    def __init__(self, config: uvicorn.Config, ready: str, drain: Callable[[float], Awaitable[None]]):
        super().__init__(config)
        self.ready, self.drain = ready, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        spare_full_collections()
        logger.info(self.ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # the workers' parent gone, the kernel ends them
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("Stopping: what was accepted is finished first; a second signal ends it at once")
        started = time.monotonic()
        await self.drain(FINISH_S)
        self.config.timeout_graceful_shutdown = max(1, round(FINISH_S - (time.monotonic() - started)))
        await super().shutdown(sockets)
