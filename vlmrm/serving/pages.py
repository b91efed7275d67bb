"""Write the pages of the service: its status, and its API with examples. They load nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import pickle
import re
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader

import vlmrm

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


def status_page(rewards: list[str]) -> HTMLResponse:
    """Return the page that shows `GET /v1/status`, with a form to try each of `rewards`."""
    return _response(_render("status.html.jinja", rewards=rewards))


@lru_cache(1)
def api_document(app: FastAPI) -> bytes:
    """Write the OpenAPI document of an application as JSON, in 10 ms."""
    return json.dumps(app.openapi()).encode()


def api_page(app: FastAPI, url: str, reward: str, *, several: bool, guarded: bool) -> HTMLResponse:
    """Return the routes and schemas of an application as a page without scripts.

    Args:
        url: the address of the service, in the examples.
        reward: the name of a reward, in the examples.
        several: whether there are others, so that addresses must name it.
        guarded: whether the examples send a token.
    """
    return _response(_api_html(app, url, reward, several, guarded))


@lru_cache(8)  # it takes 30 ms to write
def _api_html(app: FastAPI, url: str, reward: str, several: bool, guarded: bool) -> str:
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
    return _render("api.html.jinja", routes=shown, schemas=document["components"]["schemas"])


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


def _render(template: str, **content: Any) -> str:
    return TEMPLATES.get_template(template).render(nonce=NONCE, version=vlmrm.__version__, **content)


def _response(html: str) -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    headers = {"Content-Security-Policy": POLICY.format(nonce=nonce)}
    return HTMLResponse(html.replace(f'nonce="{NONCE}"', f'nonce="{nonce}"'), headers=headers)
