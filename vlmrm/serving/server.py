"""The process that listens: the front, the core, and the handlers that it starts, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from vlmrm.errors import ConfigError
from vlmrm.logs import start_log
from vlmrm.serving.http_server import BACKLOG, GC_THRESHOLDS
from vlmrm.serving.processes import Processes
from vlmrm.serving.service import Service
from vlmrm.serving.settings import RewardSettings, load_settings, validate_settings
from vlmrm.serving.telemetry import LineFormatter
from vlmrm.serving.versions import is_repository
from vlmrm.serving.worker_spec import is_trained
from vlmrm.settings import nearest_file

logger = logging.getLogger("vlmrm")

DRAIN_S = 60  # for accepted jobs when the service is told to stop
OPEN_FILES = 65_536  # that are asked for: libraries that try all numbers of files stay quick
WATCHED_S = 0.5  # between two looks whether all rewards can be loaded

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
    service = Service(settings, workers=role != "api")
    with listen(settings.host, settings.port) as listener:
        start_log("serve")
        for handler in logger.handlers:
            handler.setFormatter(LineFormatter(settings.log_format == "json"))
        if problem := asyncio.run(run(service, listener, requests=role != "workers")):
            raise ConfigError(problem)


def check_model(reward: RewardSettings) -> None:
    """Refuse at once what a worker would find to be no model after it has imported torch."""
    path = Path(reward.model_path)
    if not is_trained(reward) or (is_repository(reward.model_path) and not path.parent.is_dir()):
        return  # in the hub only a worker can tell
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
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {host} cannot be resolved ({error.strerror}): use 127.0.0.1 or 0.0.0.0.") from error
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        reason = f"{host}:{port} cannot be listened at ({error.strerror}): choose another host or port."
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: choose another with --port, or 0 for any free one."
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = f"host {host} is no address of this machine: use 127.0.0.1 or 0.0.0.0."
        raise ConfigError(reason) from error


async def run(service: Service, listener: socket.socket, *, requests: bool = True) -> str | None:
    """Serve until SIGTERM or Ctrl-C; accepted jobs are then finished, unless a second signal comes.

    Returns why the service ends by itself, where a reward will never be loaded.
    """
    loop, signals = asyncio.get_running_loop(), list[int]()
    stopping = asyncio.Event()

    def stop(number: int) -> None:
        if signals:
            os._exit(128 + number)  # the kernel then ends the workers, which die with their parent
        signals.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    processes = Processes(service, listener, requests)
    await service.start()
    await processes.start()
    gc.collect()
    gc.freeze()  # what was imported is never looked at again
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("Serving %s on %s", ", ".join(service.rewards), url)
        while not stopping.is_set() and (problem := service.unloadable()) is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), WATCHED_S)
        if not signals:
            return problem
        logger.info("Stopping: accepted requests are finished first; a second signal ends the service at once")
    finally:
        await service.drain(DRAIN_S, fetched=True)
        await processes.stop()
        await service.stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    os.kill(os.getpid(), signals[0])  # whoever waits for this process sees what has ended it
    return None
