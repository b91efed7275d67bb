"""The last layer's feed-forward part, computed for the tokens that are scored and for no others.

Nothing reads the other tokens' last hidden states: after the last attention no token sees another. Hooks do it, and
only for packed rows, whose layout says where conversations end. Scores and gradients stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vlmrm.batching.layout import Layout


def prune_last_layer(language_model: Any) -> None:
    """Lets the last layer of a Qwen-VL language model leave out what no score depends on. Calling it again does
    nothing."""
    layer = language_model.layers[-1]
    if hasattr(layer, "ends"):
        return
    layer.ends = ends = _Ends()
    layer.register_forward_pre_hook(ends, with_kwargs=True)
    layer.mlp.register_forward_pre_hook(ends.select)
    layer.mlp.register_forward_hook(ends.restore)


@dataclass(eq=False)
class _Ends:
    """Where the conversations of the row at hand end: known from the layer's own call, also where checkpointing
    repeats it."""

    layout: Layout | None = None

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("layout")

    def select(self, mlp: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """hidden[1, T, H] → those of the ends [1, N, H]."""
        if self.layout is None:
            return None
        return (args[0].index_select(1, self.layout.ends(args[0].device)),)

    def restore(self, mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        """The ends' output [1, N, H] at their places in [1, T, H], and zeros elsewhere."""
        if self.layout is None:
            return None
        whole = output.new_zeros(1, len(self.layout), output.shape[2])
        return whole.index_copy(1, self.layout.ends(output.device), output)
