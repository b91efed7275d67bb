"""The HTTP application: every protocol, the probes and the status page over one `Service`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import vlmrm
from vlmrm.serving.admin import router as operators
from vlmrm.serving.bodies import BodyMiddleware
from vlmrm.serving.errors import add_error_handlers, error_responses
from vlmrm.serving.gateway import Gateway, gateway_of
from vlmrm.serving.middleware import QUIET, RequestMiddleware
from vlmrm.serving.pages import api_document, api_page, status_page
from vlmrm.serving.protocols import routers
from vlmrm.serving.protocols.cosmos.router import RESULTS
from vlmrm.serving.service import Service
from vlmrm.serving.tokens import token_of

DRAIN_S = 30.0  # for accepted jobs, under a server that has not drained the service itself


def create_app(service: Service, *, requests: bool = True) -> FastAPI:
    """Return the application; its lifespan starts the service's workers, and finally drains and stops them.

    Args:
        requests: False leaves out the routes of the protocols, for a worker host.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        yield
        await service.drain(DRAIN_S)
        await service.stop()

    # FastAPI's own /docs and /openapi.json would need no token.
    app = FastAPI(
        title="vlmrm reward service",
        version=vlmrm.__version__,
        lifespan=lifespan,
        docs_url=None,
        openapi_url=None,
        # Spans alone: Prometheus has the metrics, and its logs would hold the texts of exceptions.
        telemetry={
            "auto_configure": True,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "exclude": lambda scope: scope["path"] in QUIET,
        },
    )
    app.state.gateway = Gateway(service)
    # The middleware that is added last is the outermost.
    app.add_middleware(
        BodyMiddleware,
        limits=service.settings.limits,
        scheduler=app.state.gateway.scheduler,
        metrics=service.metrics,
        results=(RESULTS,),
    )
    app.add_middleware(RequestMiddleware, service=service)
    add_error_handlers(app)
    app.include_router(router)
    app.include_router(operators)
    for protocol in routers() if requests else ():
        app.include_router(protocol, responses=error_responses())
    return app


router = APIRouter()


@router.get("/", include_in_schema=False)
async def page(request: Request) -> HTMLResponse:
    """Show `GET /v1/status` as a page, with a form to try a reward."""
    return status_page(gateway_of(request).authorized_rewards(request))


@router.get("/v1/status", responses=error_responses(401))
async def status(request: Request) -> dict[str, Any]:
    """Return workers, queue, last hour and recent failures of the rewards that the token opens.

    Requests, latencies (in seconds) and failures are those of this process.
    """
    gateway = gateway_of(request)
    service, names = gateway.service, gateway.authorized_rewards(request)
    rewards = []
    for name in names:
        health, (jobs, size) = service.health(name), await service.backend.depth(name)
        rewards.append(
            {"name": name, "ready": health.ready, "workers": health.workers, "jobs": jobs, "bytes": size}
            | {"errors": health.errors, "kind": health.info.get("kind"), "model": health.info.get("model")}
            | {"restarts": health.restarts, "hour": service.metrics.history.hour(name)}
        )
    decoder = service.decoder_health()
    failures = reversed(service.metrics.recent_failures)
    return {
        "version": vlmrm.__version__,
        "uptime": round(time.monotonic() - service.started),
        "draining": service.draining,
        "rewards": rewards,
        "decoder": None if decoder is None else asdict(decoder),
        "failures": [asdict(failure) for failure in failures if failure.reward in names],
    }


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Answer that the process is alive; needs no token."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"description": "A reward has no ready worker, or the service is stopping."}})
async def ready(request: Request) -> JSONResponse:
    """Answer whether every reward can be computed, else 503; needs no token, but without it the errors are left out.

    A decoder that is not loaded is reported and changes nothing: only latents need it.
    """
    gateway = gateway_of(request)
    service = gateway.service
    fields = ("ready", "workers", "errors") if gateway.is_authorized(request) else ("ready", "workers")
    healths = {name: asdict(service.health(name)) for name in service.rewards}
    rewards = {name: {key: values[key] for key in fields} for name, values in healths.items()}
    queue = service.registry.error
    loaded = all(reward["ready"] for reward in rewards.values())
    is_ready = loaded and not service.draining and queue is None and not service.errors
    answer = {"ready": is_ready, "rewards": rewards, "queue": queue or "ok"}
    if "errors" in fields and service.errors:
        answer["errors"] = list(service.errors.values())
    if (decoder := service.decoder_health()) is not None:
        answer["decoder"] = {key: getattr(decoder, key) for key in fields}
    return JSONResponse(answer, 200 if is_ready else 503)


@router.get("/v1/models", responses=error_responses(401))
async def models(request: Request) -> dict[str, Any]:
    """List the rewards that the request's token opens, with what their workers say about them."""
    gateway = gateway_of(request)
    names = gateway.authorized_rewards(request)
    data = [{"id": name, "object": "model", **gateway.service.info(name)} for name in names]
    return {"object": "list", "data": data}


@router.get("/metrics", response_class=PlainTextResponse, responses=error_responses(401))
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    gateway = gateway_of(request)
    gateway.require_authorized(request)
    await gateway.service.update_gauges()
    return Response(generate_latest(gateway.service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    gateway_of(request).authorized_rewards(request)
    return Response(api_document(request.app), media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI document as a page."""
    [reward, *_] = gateway_of(request).authorized_rewards(request)
    url = str(request.base_url.replace(username=None, password=None)).rstrip("/")
    several = len(gateway_of(request).service.rewards) > 1
    return api_page(request.app, url, reward, several=several, guarded=bool(token_of(request)))
