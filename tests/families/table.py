"""All families, in alphabetical order."""

from __future__ import annotations

from . import a_to_i, j_to_z
from .tiny import Tiny

FAMILIES: list[Tiny] = sorted([*a_to_i.FAMILIES, *j_to_z.FAMILIES], key=lambda family: family.model_type)
