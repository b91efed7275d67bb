"""Compile the blocks of a model, text and vision, around an attention that stays outside of the graphs.

What stands between matrix products (norms, rotary embeddings, activations, casts) becomes a few kernels. Attention
reads the row's layout, which is no tensor: a graph with it inside would hold for one batch. Sizes are dynamic: two
batches make the graphs, a size of one makes one more. Half precision is rounded where the library rounds it.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._dynamo import config as dynamo
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmrm.libraries import relies_on
from vlmrm.modeling.attention import SHARED
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.state import is_state_layer
from vlmrm.modeling.vision import SEGMENTS

logger = logging.getLogger("vlmrm")

relies_on(GradientCheckpointingLayer, "__init_subclass__", "gradient_checkpointing")
GRAPHS = 64  # of one function, for all kinds of its callers; torch's own limit is 8


def compile_blocks(model: RewardModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the blocks of a model, each kind once, in its first steps. Call it once, after `batcher_for`.

    The last layer is left as it is: its feed-forward part is computed for a row's ends alone, by the layout.
    """
    for name in (*SHARED.values(), *SEGMENTS.values()):
        AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))
    settings: Any = dynamo
    settings.recompile_limit = GRAPHS
    settings.optimize_ddp = False  # it would cut graphs of one block for its buckets
    kinds: Counter[str] = Counter()
    for module in model.modules():
        if is_state_layer(type(module)):
            module.forward = torch.compiler.disable(module.forward)
        elif isinstance(module, GradientCheckpointingLayer) and not hasattr(module, "ends"):
            kinds[type(module).__name__] += 1
            module.__class__ = _compiled(type(module), backend)
    logger.info(
        "Compiling %s: the first step takes one or two minutes longer (torch_compile: false turns it off)",
        " and ".join(f"{count} {name}" for name, count in kinds.items()),
    )


@cache
def _compiled(kind: type[Any], backend: str | Callable[..., Any]) -> type[Any]:
    """Return a kind of block that computes with graphs; the library wraps its checkpointing around them."""
    options: dict[str, Any] = {"options": {"emulate_precision_casts": True}} if backend == "inductor" else {}
    forward = torch.compile(inspect.unwrap(kind.forward), dynamic=True, backend=backend, **options)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
