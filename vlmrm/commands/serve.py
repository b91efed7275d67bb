"""`vlmrm serve` and its verbs, one thin function each; they import what is heavy, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from vlmrm.libraries import needs
from vlmrm.logs import say

app = App(name="serve")


@app.default
@needs("serve", "serving")
def serve(
    *,
    config: Path | None = None,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    media_root: Path | None = None,
) -> None:
    """Serve rewards over HTTP, in every protocol of docs/serving.md.

    Args:
        config: A TOML file with one [[reward_args]] for each reward.
        model: One trained checkpoint, instead of a file.
        host: Address; any but this machine's own needs a token in VLMRM_TOKEN. Default: 127.0.0.1.
        port: Default: 8080; 0 for a free one.
        media_root: Folder below which requests may name files. Default: none, requests contain their media.
    """
    from vlmrm.serving.server import serve

    serve(config, model, {"host": host, "port": port, "media_root": media_root})


@app.command
@needs("serve", "serving")
def api(*, config: Path, host: str | None = None, port: int | None = None) -> None:
    """Answer requests, and leave computing to worker hosts that share the same Redis.

    Args:
        config: The TOML file of the service, with redis_host.
        host: Address; any but this machine's own needs a token in VLMRM_TOKEN. Default: that of the file.
        port: Default: that of the file.
    """
    from vlmrm.serving.server import serve

    serve(config, None, {"host": host, "port": port}, "api")


@app.command
@needs("serve", "serving")
def workers(*, config: Path, host: str | None = None, port: int | None = None) -> None:
    """Compute what API processes that share the same Redis accept; /ready and /metrics report on it.

    Args:
        config: The TOML file of the service, with redis_host; this host may have some of the rewards only.
        host: Address; any but this machine's own needs a token in VLMRM_TOKEN. Default: that of the file.
        port: Default: that of the file.
    """
    from vlmrm.serving.server import serve

    serve(config, None, {"host": host, "port": port}, "workers")


@app.command
def prepare(*, config: Path) -> None:
    """Make the virtual environments and files of a service's rewards that are missing or out of date.

    Args:
        config: The TOML file of the service.
    """
    from vlmrm.serving.worker_spec import prepare

    prepare(config, say)
