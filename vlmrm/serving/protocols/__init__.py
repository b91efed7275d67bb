"""The protocols of the service, one folder each."""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter

PROTOCOLS = ("native", "flow_factory", "openrlhf", "vllm", "llama_factory", "tei", "cosmos")


def routers() -> list[APIRouter]:
    """The routes of every protocol."""
    return [import_module(f"{__name__}.{name}.router").router for name in PROTOCOLS]
