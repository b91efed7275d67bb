"""The baseline: a generative model with a value head, and one padded row per conversation.

The whole `ForConditionalGeneration` runs, its language-model head and all hidden states included; each row has its own
copy of the image; a value is computed for every token and read at the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from benchmarks.shapes import PAD
from vlmrm.modeling import RewardModel
from vlmrm.rendering import Rendered


class NaiveRewardModel(nn.Module):
    """A model that shares all weights with `reward`, and so has the same scores, but none of its code."""

    def __init__(self, reward: RewardModel):
        super().__init__()
        # A copy of the configuration: attention is chosen by it, and `reward` has chosen another.
        config = type(reward.config).from_dict(reward.config.to_dict())
        with reward.device:
            self.lm = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=reward.dtype)
        self.lm.model.load_state_dict(reward.model.state_dict(keep_vars=True), assign=True)
        self.value_head = reward.score

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores [B] of the inputs of `padded`."""
        outputs = self.lm(**inputs, output_hidden_states=True, use_cache=False)
        values = self.value_head(outputs.hidden_states[-1]).squeeze(-1)
        last = inputs["attention_mask"].sum(1) - 1
        return values.gather(1, last[:, None]).squeeze(1)


def padded(conversations: Sequence[Rendered]) -> dict[str, torch.Tensor]:
    """Return one row [T] per conversation, padded on the right, with its own images."""
    length = max(map(len, conversations))
    padding = [length - len(item) for item in conversations]
    media = [medium for item in conversations for medium in item.media]
    types = [item.type_ids + [0] * n for item, n in zip(conversations, padding, strict=True)]
    rows = {
        "input_ids": [item.input_ids + [PAD] * n for item, n in zip(conversations, padding, strict=True)],
        "attention_mask": [[1] * len(item) + [0] * n for item, n in zip(conversations, padding, strict=True)],
        # Gemma's name for it and Qwen's.
        ("mm_token_type_ids" if "image_grid_thw" in media[0].tensors else "token_type_ids"): types,
    }
    return {
        **{name: torch.tensor(values) for name, values in rows.items()},
        **{name: torch.cat([m.tensors[name] for m in media]) for name in media[0].tensors},
    }
