"""The page at `/`: how the service does, and a form to try a reward. `GET /v1/status` is what it shows, as JSON."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment

import vlmrm
from vlmrm.serving.app import serving
from vlmrm.serving.refusals import described

router = APIRouter()

PAGE = Environment(autoescape=True, trim_blocks=True).from_string(
    (Path(__file__).parent / "status.html.jinja").read_text(encoding="utf-8")
)
# Nothing but what the page itself holds is run, and it talks to nobody but the service.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", include_in_schema=False)
async def page(request: Request) -> HTMLResponse:
    names = serving(request).authorized_rewards(request)
    nonce = secrets.token_urlsafe(16)
    html = PAGE.render(nonce=nonce, rewards=names, version=vlmrm.__version__)
    return HTMLResponse(html, headers={"Content-Security-Policy": POLICY.format(nonce=nonce)})


@router.get("/v1/status", responses=described(401))
async def status(request: Request) -> dict[str, Any]:
    """Of the rewards that the request's token opens: workers, queue, throughput of this process, recent failures."""
    app = serving(request)
    service, names = app.service, app.authorized_rewards(request)
    rewards = []
    for name in names:
        standing, (jobs, size) = service.standing(name), await service.backend.depth(name)
        rewards.append(
            {"name": name, "ready": standing.ready, "workers": standing.workers, "jobs": jobs, "bytes": size}
            | {"errors": standing.errors, "kind": standing.info.get("kind"), "model": standing.info.get("model")}
        )
    decoding = service.decoding()
    return {
        "version": vlmrm.__version__,
        "uptime": round(time.time() - service.started),
        "draining": service.draining,
        "rewards": rewards,
        "decoder": None if decoding is None else asdict(decoding),
        "items_by_second": service.metrics.items_by_second(),
        "failures": [asdict(one) for one in reversed(service.metrics.recent_failures) if one.reward in names],
    }
