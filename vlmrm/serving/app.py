"""The HTTP application: every protocol, the probes and the status page over one `Service`."""

from __future__ import annotations

import base64
import json
import pickle
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import vlmrm
from vlmrm.serving.errors import add_error_handlers, error_responses
from vlmrm.serving.gateway import Gateway, gateway_of
from vlmrm.serving.middleware import OPERATORS, QUIET, RequestMiddleware
from vlmrm.serving.protocols import routers
from vlmrm.serving.protocols.cosmos import RESULTS
from vlmrm.serving.service import Service
from vlmrm.serving.strict_json import StrictRoute
from vlmrm.serving.versions import ModelRequest, ModelState, Versions

DRAIN_S = 30.0  # for accepted jobs, under a server that has not drained the service itself


def create_app(service: Service, *, requests: bool = True) -> FastAPI:
    """Return the application, whose lifespan runs the service; without `requests` it has no protocols."""

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
    app.add_middleware(RequestMiddleware, gateway=app.state.gateway, results=(RESULTS,))
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
    return html_response(render("status.html.jinja", rewards=request.state.client.rewards))


@router.get("/v1/status", responses=error_responses(401))
async def status(request: Request) -> dict[str, Any]:
    """Return workers, queue, last hour and recent failures, in this process, of the rewards that the client opens."""
    service, names = gateway_of(request).service, request.state.client.rewards
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
    """Answer whether every reward can be computed, else 503; without a token the errors are left out."""
    gateway = gateway_of(request)
    service = gateway.service
    fields = ("ready", "workers", "errors") if request.state.client.service else ("ready", "workers")
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
    """List the rewards that the client opens, with what their workers say about them."""
    service, names = gateway_of(request).service, request.state.client.rewards
    data = [{"id": name, "object": "model", **service.info(name)} for name in names]
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
    return Response(api_document(request.app), media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI document as a page."""
    gateway, reward = gateway_of(request), request.state.client.rewards[0]
    url = str(request.base_url.replace(username=None, password=None)).rstrip("/")
    several = len(gateway.service.rewards) > 1
    return html_response(api_html(request.app, url, reward, several, not gateway.clients.open))


# Operators -----------------------------------------------------------------------------------------------------------

operators = APIRouter(
    route_class=StrictRoute, prefix=OPERATORS + "{name}", tags=["operators"], responses=error_responses()
)


@operators.get("/model")
async def model(name: str, request: Request) -> ModelState:
    """Return which model computes the reward, and which one did before."""
    return _versions(request, name).state()


@operators.put("/model")
async def change_model(name: str, body: ModelRequest, request: Request) -> ModelState:
    """Load another model, and have it compute the reward in this process; on any failure the old one goes on."""
    return await _changed(_versions(request, name).change(body.model), request, name)


@operators.post("/rollback")
async def roll_back(name: str, request: Request) -> ModelState:
    """Have the previous model compute the reward again, if its files are as they were."""
    return await _changed(_versions(request, name).roll_back(), request, name)


@operators.post("/sleep")
async def sleep(name: str, request: Request) -> ModelState:
    """Free the accelerator's memory of the reward's workers; requests wait until it is woken."""
    return await _changed(_versions(request, name).sleep(True), request, name)


@operators.post("/wake")
async def wake(name: str, request: Request) -> ModelState:
    """Bring the weights back, and go on."""
    return await _changed(_versions(request, name).sleep(False), request, name)


def _versions(request: Request, name: str) -> Versions:
    service = gateway_of(request).service
    return service.versions[service.reward(name).name]


async def _changed(work: Awaitable[None], request: Request, name: str) -> ModelState:
    await work
    return _versions(request, name).state()


# Pages ---------------------------------------------------------------------------------------------------------------

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
# Only the page's own scripts and styles run, and they may connect to the service only.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

NONCE = "of this answer"  # in the templates' output, which is kept

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
RENDERED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
RANKED = {"query": "2 + 2?", "documents": ["4", "5"]}
SQUARE = "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQAAAABbAUdZAAAAEUlEQVR42mP8z8DAwMQwaAkAswEBP25AfJYAAAAASUVORK5CYII="
PICKLE = base64.b64encode(pickle.dumps({"images": [base64.b64decode(SQUARE)], "prompts": ["a square"]}, 4)).decode()
HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, 4, 4, 3)}\n"
NPY = base64.b64encode(b"\x93NUMPY\x01\x00" + bytes([len(HEADER), 0]) + HEADER + bytes(4 * 4 * 3)).decode()
TENSOR = '{"prompts": ["a square"], "reward_fn": {"NAME": 1}, "media_type": "image"}'
# Bodies of requests by the end of their route; of those that are no JSON, a command in which CALL is curl's.
EXAMPLES: dict[str, Any] = {
    "/v1/rewards": {
        "model": "NAME",
        "transform": "zscore",
        "items": [{"group": 1, "prompt": "2 + 2?", "response": "4"}],
    },
    "/compute": {"prompt": ["a square"], "image": [SQUARE]},
    "/get_reward": {"query": ["2 + 2?4"], "prompts": ["2 + 2?"], "labels": [{"prompt": "2 + 2?"}]},
    "/v1/score/evaluation": {"messages": [RENDERED]},
    "/remote_rm": {"prompt": "2 + 2?", "response": "4", "label": None},
    "/classify": {"model": "NAME", "messages": TALK},
    "/pooling": {"model": "NAME", "messages": TALK, "use_activation": False},
    "/v1/embeddings": {"model": "NAME", "messages": TALK},
    "/score": {"model": "NAME", "queries": "2 + 2?", "documents": ["4", "5"]},
    "/rerank": RANKED,
    "/predict": {"inputs": [["2 + 2?", "4"]], "raw_scores": True},
    "/unirl/score": {
        "requests": [{"history": [{"text": "a square", "image_b64": SQUARE}], "required_rewards": ["NAME"]}]
    },
    "/verl_omni": f"echo {PICKLE} | base64 -d |\n  CALL --data-binary @- --output answer.pickle",
    "/model": {"model": "/models/next"},
    "/api/reward/enqueue": (
        f"answer=$({{ echo '{TENSOR}'; echo {NPY} | base64 -d; }} |\n  CALL -s --data-binary @-)\necho $answer"
    ),
    "/api/reward/pull": "CALL -d uuid=$(echo $answer | cut -d '\"' -f 4) -d type=NAME",
}


@lru_cache(1)
def api_document(app: FastAPI) -> bytes:
    """Write the OpenAPI document of an application as JSON, in 10 ms."""
    return json.dumps(app.openapi()).encode()


@lru_cache(8)  # it takes 30 ms to write
def api_html(app: FastAPI, url: str, reward: str, several: bool, guarded: bool) -> str:
    """Return the routes and schemas of an application as a page, with examples for `url`.

    With `several` rewards addresses name `reward`; where it is `guarded`, examples send a token.
    """
    document = app.openapi()
    routes: dict[tuple[str, str, str], dict[str, Any]] = {}  # one for all paths of a function
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["The service"])[0]
            route = routes.setdefault((method, operation["summary"], tag), {"paths": [], "operation": operation})
            route["paths"].append(path)
    for (method, _, tag), route in routes.items():
        path = min(route["paths"], key=lambda it: (("{" in it) != several, len(it)))
        token = "VLMRM_ADMIN_TOKEN" if tag == "operators" else "VLMRM_TOKEN" if guarded else ""
        command = example_call(method, re.sub(r"{\w+}", reward, path), url, reward, token)
        route |= {"method": method.upper(), "tag": tag, "example": command}
    shown = sorted(routes.values(), key=lambda it: (it["tag"] == "operators", it["method"] == "GET"))
    return render("api.html.jinja", routes=shown, schemas=document["components"]["schemas"])


def example_body(path: str, reward: str) -> Any:
    """Return the body of an example request to a path: a JSON tree, or a command with CALL; None for none."""
    found = next((end for end in sorted(EXAMPLES, key=len, reverse=True) if path.endswith(end)), None)
    return None if found is None else json.loads(json.dumps(EXAMPLES[found]).replace('"NAME"', json.dumps(reward)))


def example_call(method: str, path: str, url: str, reward: str, token: str) -> str:
    """Return a curl command that calls a route; `token` is the variable with what it needs, or ""."""
    words = [f"curl {url}{path}"]
    if token:
        words.append(f'-H "Authorization: Bearer ${token}"')
    body = example_body(path, reward) if method != "get" else None
    if method not in ("get", "post") or (method == "post" and body is None):
        words.append(f"-X {method.upper()}")
    if not isinstance(body, str | None):
        words.append(f"-H 'Content-Type: application/json' -d '{json.dumps(body, ensure_ascii=False)}'")
    call = " \\\n  ".join(words)
    return body.replace("CALL", call).replace("NAME", reward) if isinstance(body, str) else call


def render(template: str, **content: Any) -> str:
    return TEMPLATES.get_template(template).render(nonce=NONCE, version=vlmrm.__version__, **content)


def html_response(html: str) -> HTMLResponse:
    """Return a page whose own scripts and styles alone run."""
    nonce = secrets.token_urlsafe(16)
    headers = {"Content-Security-Policy": POLICY.format(nonce=nonce)}
    return HTMLResponse(html.replace(f'nonce="{NONCE}"', f'nonce="{nonce}"'), headers=headers)
