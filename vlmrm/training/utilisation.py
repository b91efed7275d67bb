"""How much of a GPU a training uses: the operations of its blocks over those that the device could compute (MFU).

Counted, each multiplication with its addition as 2: the matrices of a block for each of its tokens, and attention's
two products for each pair of a query and a key that it sees. Forward, gradients by inputs where there are any, and by
weights that are trained; what checkpointing computes again counts for nothing. Embeddings, merger and head are left
out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmrm.batching.shared import PackedLayout
from vlmrm.modeling.experts import expert_weights
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.vision import segments_of

# Dense bfloat16 by the data sheets, in operations a second; a part of the name that torch gives the device.
DATA_SHEET = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def data_sheet_rate(device: torch.device) -> float | None:
    """Return the operations a second that a device has by its data sheet; None where it is not known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for model, rate in DATA_SHEET.items() if model in name), None)


class Matrices(NamedTuple):
    """Numbers in the matrices of a block that a token goes through: before its `mlp`, in it, and the share trained."""

    mixer: float
    mlp: float
    trained: float

    @classmethod
    def of(cls, block: nn.Module, experts: int) -> Matrices:
        shared_out = set(expert_weights(block))
        sizes = {
            name: (weight.numel() * (experts / len(weight) if name in shared_out else 1), weight.requires_grad)
            for name, weight in block.named_parameters()
            if weight.dim() > 1
        }
        total, mlp = (sum(n for name, (n, _) in sizes.items() if name.startswith(part)) for part in ("", "mlp."))
        return cls(total - mlp, mlp, sum(n for n, trained in sizes.values() if trained) / (total or 1))


class Operations:
    """Adds up the `done` operations of a model's blocks, in the forwards for which it is `on`."""

    def __init__(self, model: RewardModel):
        self.on, self.done = False, 0.0
        self._experts = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)  # that a token goes through
        self._matrices: dict[nn.Module, Matrices] = {}  # of each block, counted once: a walk takes the host longer
        for block in model.modules():
            if isinstance(block, GradientCheckpointingLayer):
                block.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.on:
            return
        hidden: torch.Tensor = args[0] if args else keywords["hidden_states"]
        tokens, layout = hidden.numel() // hidden.shape[-1], keywords.get("layout")
        ends = len(layout.last_tokens) if isinstance(layout, PackedLayout) and hasattr(block, "ends") else tokens
        if block not in self._matrices:
            self._matrices[block] = Matrices.of(block, self._experts)
        matrices = self._matrices[block]
        products = 2 * (tokens * matrices.mixer + ends * matrices.mlp)
        learned = products * matrices.trained
        attention = 4 * hidden.shape[-1] * _pairs(hidden, keywords)
        backward = torch.is_grad_enabled() and (hidden.requires_grad or learned > 0)
        self.done += products * (1 + backward) + learned + attention * (1 + 2 * backward)


def _pairs(hidden: torch.Tensor, keywords: dict[str, Any]) -> float:
    """Return the pairs of a query and a key in a block's attention."""
    if isinstance(layout := keywords.get("layout"), PackedLayout):
        sizes = [(span.stop - span.start, span.before) for span in layout.spans]
        return sum(queries * (before + (queries + 1) / 2) for queries, before in sizes)
    if (cumulative := keywords.get("cu_seqlens")) is not None:  # of a tower
        return float(sum(length**2 for length in segments_of(cumulative).lengths))
    length = hidden.shape[-2]
    return hidden.numel() // hidden.shape[-1] * length / (2 if keywords.get("position_embeddings") is not None else 1)
