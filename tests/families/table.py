"""All families, in alphabetical order."""

from __future__ import annotations

from . import a_to_i
from .tiny import Tiny

FAMILIES: list[Tiny] = sorted([*a_to_i.FAMILIES], key=lambda family: family.model_type)
