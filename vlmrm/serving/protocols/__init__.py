"""The protocols of the service: a file for each, or for several that ask alike."""

from __future__ import annotations

from fastapi import APIRouter

ROUTERS: list[APIRouter] = []  # those of plugins, asked before the others


def routers() -> list[APIRouter]:
    """Return the routes of every protocol."""
    from vlmrm.serving.protocols import cosmos, native, trainers, vllm

    return [*ROUTERS, *(it.router for it in (native, trainers, vllm, cosmos))]
