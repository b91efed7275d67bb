"""What the processes of a training agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vlmrm.errors import VlmrmError

T = TypeVar("T")


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is set on some rank. Every rank must call it."""
    if not dist.is_initialized():
        return flag
    votes = torch.tensor(int(flag), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return on every rank what `compute` returns on the first, which alone calls it. Every rank must call this.

    Raises:
        VlmrmError: on every rank, what `compute` raises on the first.
    """
    if not dist.is_initialized():
        return compute()
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [compute()]
        except VlmrmError as error:
            shared = [error]
    dist.broadcast_object_list(shared)
    if isinstance(shared[0], VlmrmError):
        raise shared[0]
    return shared[0]
