"""The HTTP application: every protocol, the probes and the status page over one `Service`."""

from __future__ import annotations

import base64
import json
import pickle
import re
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader
from prometheus_client import CONTENT_TYPE_LATEST

import vlmrm
from vlmrm.serving.front import OPERATORS, QUIET
from vlmrm.serving.gateway import Gateway, gateway_of
from vlmrm.serving.protocols import routers
from vlmrm.serving.responses import add_error_handlers, error_responses
from vlmrm.serving.settings import ServiceSettings
from vlmrm.serving.strict_json import StrictRoute
from vlmrm.serving.versions import ModelRequest, ModelState

if TYPE_CHECKING:
    from vlmrm.serving.handler import RemoteCore
    from vlmrm.serving.service import Service


def create_app(settings: ServiceSettings, core: Service | RemoteCore, *, requests: bool = True) -> FastAPI:
    """Return the application that handles requests by asking the core; without `requests` it has no protocols."""
    # FastAPI's own /docs and /openapi.json would need no token.
    app = FastAPI(
        title="vlmrm reward service",
        version=vlmrm.__version__,
        docs_url=None,
        openapi_url=None,
        # Spans alone: Prometheus has the metrics, and its logs would hold the texts of exceptions.
        telemetry={
            "auto_configure": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "exclude": lambda scope: scope["path"] in QUIET,
        },
    )
    app.state.gateway = Gateway(settings, core)
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
    return shown("status.html.jinja", rewards=request.state.client.rewards)


@router.get("/v1/status", responses=error_responses(401))
async def status(request: Request) -> dict[str, Any]:
    """Return workers, queue, last hour and recent failures, in this process, of the rewards that the client opens."""
    gateway = gateway_of(request)
    state = gateway.core.state
    return {
        "version": vlmrm.__version__,
        "draining": state.draining,
        "decoder": None if state.decoder is None else asdict(state.decoder),
        **await gateway.core.describe(request.state.client.rewards),
    }


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"description": "A reward has no ready worker, or the service is stopping."}})
async def ready(request: Request) -> JSONResponse:
    """Answer whether every reward can be computed, else 503; without a token the errors are left out."""
    state = gateway_of(request).core.state
    fields = ("ready", "workers", "errors") if request.state.client.service else ("ready", "workers")
    rewards = {name: {key: getattr(health, key) for key in fields} for name, health in state.rewards.items()}
    loaded = all(reward["ready"] for reward in rewards.values())
    is_ready = loaded and not state.draining and state.queue is None and not state.errors
    answer = {"ready": is_ready, "rewards": rewards, "queue": state.queue or "ok"}
    if "errors" in fields and state.errors:
        answer["errors"] = list(state.errors.values())
    if state.decoder is not None:
        answer["decoder"] = {key: getattr(state.decoder, key) for key in fields}
    return JSONResponse(answer, 200 if is_ready else 503)


@router.get("/v1/models", responses=error_responses(401))
async def models(request: Request) -> dict[str, Any]:
    """List the rewards that the client opens, with what their workers say about them."""
    gateway, names = gateway_of(request), request.state.client.rewards
    data = [{"id": name, "object": "model", **gateway.info(name)} for name in names]
    return {"object": "list", "data": data}


@router.get("/metrics", response_class=PlainTextResponse, responses=error_responses(401))
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    gateway = gateway_of(request)
    gateway.require_authorized(request)
    of_front = await request.body()  # which it has put there
    return Response(of_front + (await gateway.core.measure()).encode(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI document as a page: routes, with an example of each, and schemas."""
    gateway, reward = gateway_of(request), request.state.client.rewards[0]
    url = str(request.base_url.replace(username=None, password=None)).rstrip("/")
    document, several = request.app.openapi(), len(gateway.rewards) > 1  # of which addresses name one
    routes: dict[tuple[str, str, str], dict[str, Any]] = {}  # one for all paths of a function
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["The service"])[0]
            route = routes.setdefault((method, operation["summary"], tag), {"paths": [], "operation": operation})
            route["paths"].append(path)
    for (method, _, tag), route in routes.items():
        path = min(route["paths"], key=lambda it: (("{" in it) != several, len(it)))
        token = "VLMRM_ADMIN_TOKEN" if tag == "operators" else "VLMRM_TOKEN" if gateway.settings.callers else ""
        command = example_call(method, re.sub(r"{\w+}", reward, path), url, reward, token)
        route |= {"method": method.upper(), "tag": tag, "example": command}
    ordered = sorted(routes.values(), key=lambda it: (it["tag"] == "operators", it["method"] == "GET"))
    return shown("api.html.jinja", routes=ordered, schemas=document["components"]["schemas"])


# Operators -----------------------------------------------------------------------------------------------------------

operators = APIRouter(
    route_class=StrictRoute, prefix=OPERATORS + "{name}", tags=["operators"], responses=error_responses()
)


@operators.get("/model")
async def model(name: str, request: Request) -> ModelState:
    """Return which model computes the reward, and which one did before."""
    return await _operate(request, name, "look")


@operators.put("/model")
async def change_model(name: str, body: ModelRequest, request: Request) -> ModelState:
    """Load another model, and have it compute the reward in this process; on any failure the old one goes on."""
    return await _operate(request, name, "change", body.model)


@operators.post("/{action}")
async def act(name: str, action: Literal["rollback", "sleep", "wake"], request: Request) -> ModelState:
    """Have the previous model compute the reward again, or free the accelerator's memory until it shall wake."""
    return await _operate(request, name, action)


async def _operate(request: Request, name: str, action: str, model: str = "") -> ModelState:
    gateway = gateway_of(request)
    return ModelState(**await gateway.core.operate(gateway.reward(name).name, action, model))


# Pages ---------------------------------------------------------------------------------------------------------------

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
# Only the page's own scripts and styles run, and they may connect to the service only.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
RENDERED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
SQUARE = "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQAAAABbAUdZAAAAEUlEQVR42mP8z8DAwMQwaAkAswEBP25AfJYAAAAASUVORK5CYII="
TURN = {"text": "a square", "image_b64": SQUARE}
PICKLE = base64.b64encode(pickle.dumps({"images": [base64.b64decode(SQUARE)], "prompts": ["a square"]}, 4)).decode()
HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, 4, 4, 3)}\n"
NPY = base64.b64encode(b"\x93NUMPY\x01\x00" + bytes([len(HEADER), 0]) + HEADER + bytes(4 * 4 * 3)).decode()
TENSOR = '{"prompts": ["a square"], "reward_fn": {"NAME": 1}, "media_type": "image"}'
# Bodies of requests by the end of their route; of those that are no JSON, a command in which CALL is curl's.
EXAMPLES: dict[str, Any] = {
    "/v1/rewards": {"model": "NAME", "transform": "zscore", "items": [{"prompt": "2 + 2?", "response": "4"}]},
    "/compute": {"prompt": ["a square"], "image": [SQUARE]},
    "/get_reward": {"query": ["2 + 2?4"], "prompts": ["2 + 2?"], "labels": [{"prompt": "2 + 2?"}]},
    "/v1/score/evaluation": {"messages": [RENDERED]},
    "/remote_rm": {"prompt": "2 + 2?", "response": "4", "label": None},
    "/classify": {"model": "NAME", "messages": TALK},
    "/pooling": {"model": "NAME", "messages": TALK, "use_activation": False},
    "/v1/embeddings": {"model": "NAME", "messages": TALK},
    "/score": {"model": "NAME", "queries": "2 + 2?", "documents": ["4", "5"]},
    "/rerank": {"query": "2 + 2?", "documents": ["4", "5"]},
    "/predict": {"inputs": [["2 + 2?", "4"]], "raw_scores": True},
    "/unirl/score": {"requests": [{"history": [TURN], "required_rewards": ["NAME"]}]},
    "/verl_omni": f"echo {PICKLE} | base64 -d |\n  CALL --data-binary @- --output answer.pickle",
    "/model": {"model": "/models/next"},
    "/api/reward/enqueue": (
        f"answer=$({{ echo '{TENSOR}'; echo {NPY} | base64 -d; }} |\n  CALL -s --data-binary @-)\necho $answer"
    ),
    "/api/reward/pull": "CALL -d uuid=$(echo $answer | cut -d '\"' -f 4) -d type=NAME",
}


def example_call(method: str, path: str, url: str, reward: str, token: str) -> str:
    """Return a curl command that calls a route; `token` is the variable with what it needs, or ""."""
    words = [f"curl {url}{path}"]
    if token:
        words.append(f'-H "Authorization: Bearer ${token}"')
    end = max((end for end in EXAMPLES if path.endswith(end)), key=len, default="")
    body = EXAMPLES.get(end) if method != "get" else None
    if method not in ("get", "post") or (method == "post" and body is None):
        words.append(f"-X {method.upper()}")
    if isinstance(body, dict):
        sent = json.dumps(body).replace('"NAME"', json.dumps(reward, ensure_ascii=False))
        words.append(f"-H 'Content-Type: application/json' -d '{sent}'")
    call = " \\\n  ".join(words)
    return body.replace("CALL", call).replace("NAME", reward) if isinstance(body, str) else call


def shown(template: str, **content: Any) -> HTMLResponse:
    """Return a page whose own scripts and styles alone run."""
    nonce = secrets.token_urlsafe(16)
    html = TEMPLATES.get_template(template).render(nonce=nonce, version=vlmrm.__version__, **content)
    return HTMLResponse(html, headers={"Content-Security-Policy": POLICY.format(nonce=nonce)})
