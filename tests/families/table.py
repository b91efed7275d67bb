"""All families, in alphabetical order: the tiny checkpoints, and those that are refused by name."""

from __future__ import annotations

from vlmrm.modeling.families import REFUSED

from . import llavas, qwens, singles
from .grids import GRIDS
from .squares import SQUARES
from .tiny import Tiny

REFUSALS = [Tiny(model_type, refused=reason) for model_type, reason in REFUSED.items()]
FAMILIES: list[Tiny] = sorted(
    [*GRIDS, *SQUARES, *llavas.FAMILIES, *qwens.FAMILIES, *singles.FAMILIES, *REFUSALS],
    key=lambda family: family.model_type,
)
