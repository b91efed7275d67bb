"""The process that listens: uvicorn over the application, with limits on headers and a graceful end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on
from vlmrm.logs import start_log
from vlmrm.serving.app import create_app
from vlmrm.serving.errors import error_response
from vlmrm.serving.middleware import HEADER_BYTES, connection_limit
from vlmrm.serving.service import Service
from vlmrm.serving.settings import RewardSettings, load_settings, validate_settings
from vlmrm.serving.telemetry import LineFormatter
from vlmrm.serving.versions import is_repository
from vlmrm.serving.worker_spec import is_trained
from vlmrm.settings import nearest_file

logger = logging.getLogger("vlmrm")

BACKLOG = 2048
ACCEPTED = 16  # connections in one round of the event loop, which many would hold up
DRAIN_S = 60  # for accepted jobs when the service is told to stop
# Clients' pools keep connections for up to a minute; the client should be the one that closes first.
KEEP_ALIVE_S = 75
GC_THRESHOLDS = (700, 10, 10_000)  # Python's own, but full collections a thousand times rarer
HEADER_S = 15.0
READ_BYTES = 64 * 2**10  # at a time: all that is in them is parsed in one go
PIECES, PIECE_BYTES = 4096, 64  # of a body: that many may be shorter on average
OPEN_FILES = 65_536  # that are asked for: libraries that try all numbers of files stay quick
DISCARDED_BYTES = 16 * 2**20  # of a refused body, so that its sender can read the answer before it is cut off
WRITE_S = 60.0  # for a client to take some of its answer
WATCHED_S = 0.5  # between two looks whether all rewards can be loaded
WARNING_S = 10.0  # between two warnings of too many connections

Role = Literal["everything", "api", "workers"]


def serve(config: Path | None, model: str | None, overrides: Mapping[str, Any], role: Role = "everything") -> None:
    """Serve until told to stop; SIGTERM lets accepted jobs finish. `overrides` take precedence over the file.

    With the role `api` it answers requests, with `workers` it computes them: any number of each share one Redis.
    """
    if (config is None) == (model is None):
        raise ConfigError("give either --config FILE or --model CHECKPOINT.")
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if config is not None:
        settings = load_settings(config, **overrides)
    else:
        reward = {"reward_type": "vlm_reward", "model_path": model}
        settings = validate_settings({**overrides, "reward_args": [reward]}, "the command line")
    if role != "everything" and not settings.has_redis:
        raise ConfigError(f"vlmrm serve {role} shares its queue with other processes: set redis_host or redis_url.")
    for reward in settings.reward_args if role != "api" else ():
        check_model(reward)
    raise_file_limit()  # before the application reads it
    app = create_app(Service(settings, workers=role != "api"), requests=role != "workers")
    with listen(settings.host, settings.port) as listener:
        start_log("serve")
        for handler in logger.handlers:
            handler.setFormatter(LineFormatter(settings.log_format == "json"))
        run(app, listener, ", ".join(reward.name for reward in settings.reward_args))


def check_model(reward: RewardSettings) -> None:
    """Refuse at once what a worker would find to be no model after it has imported torch."""
    path = Path(reward.model_path)
    if not is_trained(reward) or reward.ray_address or (is_repository(reward.model_path) and not path.parent.is_dir()):
        return  # on other machines, or in the hub, only a worker can tell
    if not path.is_dir():
        near = nearest_file(path, ": check the path.")
        raise ConfigError(f"the model of {reward.name} is {path}, which is no folder{near}")
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"the model of {reward.name} is {path}, which is no checkpoint, as it has neither a config.json nor an "
            "adapter_config.json: name the folder that has one, such as best in that of a training."
        )


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as it may be: each connection is a file, and 1,024 are soon gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listen(host: str, port: int) -> socket.socket:
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
        reason = f"{host}:{port} cannot be listened at ({error.strerror}): choose another host or port."
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: choose another with --port, or 0 for any free one."
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = f"host {host} is no address of this machine: use 127.0.0.1 or 0.0.0.0."
        raise ConfigError(reason) from error
    listener.listen(BACKLOG)
    return listener


def run(app: FastAPI, listener: socket.socket, names: str) -> None:
    """Serve `app` until SIGTERM or Ctrl-C; accepted jobs are then finished, unless a second signal comes."""
    # The service logs requests itself, and `Clients` reads the headers of proxies that are trusted.
    config = uvicorn.Config(
        app,
        http=HeaderLimitProtocol,
        # uvloop, where it is installed, accepts one connection in each round of the loop, and a request takes two
        # rounds: under overload connections would wait for seconds, those of /health too.
        loop="asyncio",
        backlog=ACCEPTED,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("uvicorn", "asyncio"):  # the latter says that no connection can be accepted
        logging.getLogger(name).handlers = logger.handlers
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = DrainingServer(config, f"Serving {names} on {url}", app.state.gateway.service)
    server.run(sockets=[listener])
    if server.problem is not None:
        raise ConfigError(server.problem)


relies_on(uvicorn.Server, overridden=("startup", "handle_exit", "shutdown"), attributes=("should_exit",))


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which drains the service before it closes the port, and ends once there is a `problem`."""

    def __init__(self, config: uvicorn.Config, ready: str, service: Service):
        super().__init__(config)
        self.ready, self.service = ready, service
        self.problem: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # those that wait to be accepted, which asyncio takes for those of a round
        # With thousands of requests a full collection stops the event loop for half a second, for nothing: nearly all
        # garbage of a request is freed by reference counts, or young. What was imported is never looked at again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        logger.info(self.ready)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (problem := self.service.unloadable()) is None:
            await asyncio.sleep(WATCHED_S)
        self.problem, self.should_exit = problem, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # the kernel then ends the workers, which die with their parent
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("Stopping: accepted requests are finished first; a second signal ends the service at once")
        started = time.monotonic()
        await self.service.drain(DRAIN_S, fetched=True)
        self.config.timeout_graceful_shutdown = max(1, round(DRAIN_S - (time.monotonic() - started)))
        await super().shutdown(sockets)


relies_on(
    HttpToolsProtocol,
    *("send_400_response", "connection_made", "connection_lost", "data_received"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_response_complete", "pause_writing", "resume_writing"),
    attributes=("loop", "transport", "connections", "cycle", "pipeline", "flow"),
)


class HeaderLimitProtocol(HttpToolsProtocol):
    """A connection that is closed when a request's headers take longer than `HEADER_S`, or exceed `HEADER_BYTES`.

    So is one that goes on sending a refused body, does not read its answer, or sends thousands of tiny chunks.
    """

    warned = -math.inf  # when it was logged that connections are too many
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _read = 0  # bytes of the headers so far
    _discarded = 0  # bytes of the body that came after the answer
    _pieces = _received = 0  # of the body, and their bytes
    _fault = "what came is no request of HTTP/1.1: send one."
    idle_since = math.inf  # inf while a request is answered

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # asyncio's own is 256 KiB
        self.idle_since = self.loop.time()
        self._start_timer()
        if len(self.connections) > connection_limit():
            self._close_idle()

    def _close_idle(self) -> None:
        """Close the connection that waits longest for a request, so that no new one is refused for want of files."""
        others = [it for it in self.connections if isinstance(it, HeaderLimitProtocol) and it is not self]
        idle = min(others, key=lambda it: it.idle_since, default=self)
        if time.monotonic() > HeaderLimitProtocol.warned + WARNING_S:
            HeaderLimitProtocol.warned = time.monotonic()
            message = "%d connections are open, as many as the limit of files leaves: those that are idle are closed"
            logger.warning(message, len(self.connections))
        if idle.idle_since < math.inf:
            idle.idle_since = math.inf  # it is closed in the next round: meanwhile others make room
            idle.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)
        # It refers back to its transport, and full collections are too rare for a cycle of every connection.
        if hasattr(self.transport, "_read_ready_cb"):  # of asyncio's own loop
            self.transport._read_ready_cb = None  # ty: ignore[invalid-assignment]

    def data_received(self, data: bytes) -> None:
        timer = self._timer
        super().data_received(data)
        if timer is None or self._timer is not timer:  # no headers, or such as have begun in this piece
            return
        self._read += len(data)
        if self._read > HEADER_BYTES:
            self._fault = f"the headers are over the limit of {HEADER_BYTES} bytes: send fewer, or shorter ones."
            self.send_400_response(self._fault)

    def send_400_response(self, msg: str) -> None:
        response = error_response(self._fault, "InvalidRequest", 400, {"Connection": "close"})
        headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%s\r\n%s" % (headers, response.body))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._discarded = self._pieces = self._received = 0
        if self._timer is None:  # a further request of a kept connection
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.idle_since = math.inf
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._received += len(body)
        if self._pieces > PIECES and self._received < PIECE_BYTES * self._pieces:
            self._fault = (
                f"the body came in over {PIECES} pieces of {self._received / self._pieces:.0f} bytes on average: send "
                "it with a Content-Length, or in larger chunks."
            )
            raise ValueError(self._fault)  # ends the parser's work, upon which `send_400_response` is called
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > DISCARDED_BYTES:
                self._close()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self.pipeline:  # uvicorn reads on, and would hold what comes
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _start_timer(self) -> None:
        self._read = 0
        self._timer = self.loop.call_later(HEADER_S, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
