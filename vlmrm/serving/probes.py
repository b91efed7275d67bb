"""What says whether the service lives, can answer, how it does and what it can be asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vlmrm.serving.app import serving
from vlmrm.serving.refusals import described

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the process answers; without a token."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"description": "One of them cannot, or the service is stopping."}})
async def ready(request: Request) -> JSONResponse:
    """Whether every reward can be computed, else 503; without a token. What is wrong is for those who have it.

    A decoder that is not loaded is said and no more: images and videos need none, and latents wait or are refused.
    """
    app = serving(request)
    told = ("ready", "workers", "errors") if app.is_authorized(request) else ("ready", "workers")
    standings = {name: asdict(app.service.standing(name)) for name in app.service.rewards}
    rewards = {name: {key: standing[key] for key in told} for name, standing in standings.items()}
    queue = app.service.presence.error
    good = not app.service.draining and queue is None and all(one["ready"] for one in rewards.values())
    answer = {"ready": good, "rewards": rewards, "queue": queue or "ok"}
    if (decoding := app.service.decoding()) is not None:
        answer["decoder"] = {key: getattr(decoding, key) for key in told}
    return JSONResponse(answer, 200 if good else 503)


@router.get("/v1/models", responses=described(401))
async def models(request: Request) -> dict[str, Any]:
    """The rewards that the request's token opens, and what their workers say of them."""
    app = serving(request)
    data = [{"id": name, "object": "model", **app.service.info(name)} for name in app.authorized_rewards(request)]
    return {"object": "list", "data": data}


@router.get("/metrics", response_class=PlainTextResponse, responses=described(401))
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    app = serving(request)
    app.authorized(request)
    await app.service.measure()
    return Response(generate_latest(app.service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    serving(request).authorized_rewards(request)
    return JSONResponse(request.app.openapi())


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    serving(request).authorized_rewards(request)
    return get_swagger_ui_html(openapi_url="openapi.json", title=request.app.title)
