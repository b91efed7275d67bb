"""What turns conversations into model inputs, and which of them go together under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vlmrm.rendering import Rendered

# Conversations that must stay together: the branches of one comparison, whose scores are compared.
Unit = Sequence[Rendered]


class Batcher(Protocol):
    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, Any]:
        """The inputs of a model that answers one score for each conversation, in order."""
        ...

    def split(self, units: Sequence[Unit], budget: int) -> list[list[int]]:
        """Numbers of `units` in parts of at most `budget` tokens and image patches; a larger unit goes alone."""
        ...
