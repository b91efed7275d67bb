"""The routes of an operator: which model computes a reward, and whether it holds an accelerator's memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response

from vlmrm.serving.errors import error_responses
from vlmrm.serving.gateway import Gateway, gateway_of
from vlmrm.serving.strict_json import StrictRoute
from vlmrm.serving.versions import ModelRequest, ModelState

ELSEWHERE: dict[int | str, dict[str, Any]] = {202: {"description": "Others have the workers.", "model": ModelState}}


class OperatorRoute(StrictRoute):
    """A route that checks the token before it looks at the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            gateway_of(request).require_admin(request)
            return await handle(request)

        return guarded


router = APIRouter(
    route_class=OperatorRoute, prefix="/v1/rewards/{name}", tags=["operators"], responses=error_responses()
)


@router.get("/model")
async def model(name: str, request: Request) -> ModelState:
    """Return which model computes the reward, and which one did before."""
    return _state(_gateway(request, name), name)


@router.put("/model", responses=ELSEWHERE)
async def change_model(name: str, body: ModelRequest, request: Request, response: Response) -> ModelState:
    """Load another model, prove it, and have it compute the reward; on any failure the old one goes on.

    It answers once the workers of this process have it, with 202 where it has none; processes that share its queue
    follow within seconds, and their errors are in the state.
    """
    gateway = _gateway(request, name)
    await gateway.service.versions[name].change(body)
    return _changed(gateway, name, response)


@router.post("/rollback", responses=ELSEWHERE)
async def roll_back(name: str, request: Request, response: Response) -> ModelState:
    """Have the previous model compute the reward again, if its files are as they were."""
    gateway = _gateway(request, name)
    await gateway.service.versions[name].roll_back()
    return _changed(gateway, name, response)


@router.post("/sleep", responses=ELSEWHERE)
async def sleep(name: str, request: Request, response: Response) -> ModelState:
    """Free the accelerator's memory of the reward's workers; requests wait until it is woken."""
    gateway = _gateway(request, name)
    await gateway.service.versions[name].sleep(asleep=True)
    return _changed(gateway, name, response)


@router.post("/wake", responses=ELSEWHERE)
async def wake(name: str, request: Request, response: Response) -> ModelState:
    """Bring the weights back, and go on."""
    gateway = _gateway(request, name)
    await gateway.service.versions[name].sleep(asleep=False)
    return _changed(gateway, name, response)


def _gateway(request: Request, name: str) -> Gateway:
    gateway = gateway_of(request)
    gateway.service.reward(name)
    return gateway


def _state(gateway: Gateway, name: str) -> ModelState:
    return gateway.service.versions[name].state(gateway.service.health(name))


def _changed(gateway: Gateway, name: str, response: Response) -> ModelState:
    """Return the state as the answer to a change; 202 where other processes have the workers and make it later."""
    response.status_code = 200 if gateway.service.replicas[name] else 202
    return _state(gateway, name)
