"""How much of a GPU a training uses: the operations of its blocks over those that the device could compute (MFU).

Counted, each multiplication with its addition as 2: the matrices of a block for each of its tokens, and attention's
two products for each pair of a query and a key that it sees. Forward, gradients by inputs where there are any, and by
weights that are trained; what checkpointing computes again counts for nothing. Embeddings, merger and head are left
out.
"""

from __future__ import annotations

from typing import Any

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


class Operations:
    """Adds up the `done` operations of a model's blocks, in the forwards for which it is `on`."""

    def __init__(self, model: RewardModel):
        self.on, self.done = False, 0.0
        config: Any = model.config.get_text_config()
        self._chosen = getattr(config, "num_experts_per_tok", 1)
        for block in model.modules():
            if isinstance(block, GradientCheckpointingLayer):
                block.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.on:
            return
        hidden: torch.Tensor = args[0] if args else keywords["hidden_states"]
        tokens, layout = hidden.numel() // hidden.shape[-1], keywords.get("layout")
        ends = len(layout.last_tokens) if isinstance(layout, PackedLayout) and hasattr(block, "ends") else tokens
        experts = dict.fromkeys(expert_weights(block), self._chosen)
        products = learned = 0.0
        for name, weight in block.named_parameters():
            if weight.dim() > 1:
                share = experts[name] / len(weight) if name in experts else 1
                product = 2 * weight.numel() * share * (ends if name.startswith("mlp.") else tokens)
                products, learned = products + product, learned + product * weight.requires_grad
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
