"""The protocols of the service: a file for each, or for several that ask alike; cosmos-rl's has a folder."""

from __future__ import annotations

from fastapi import APIRouter

ROUTERS: list[APIRouter] = []  # those of plugins, asked before the others


def routers() -> list[APIRouter]:
    """Return the routes of every protocol."""
    from vlmrm.serving.protocols import flow_factory, native, rerank, trainers, vllm
    from vlmrm.serving.protocols.cosmos import router as cosmos

    # Those of UniRL before Flow-Factory's: a reward's name may be any in `/{reward}/health`.
    return [*ROUTERS, *(it.router for it in (native, trainers, flow_factory, vllm, rerank, cosmos))]
