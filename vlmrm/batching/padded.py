"""The reference batch: one padded row a conversation, every image repeated in each. Slow, plain, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmrm.rendering import Rendered


@dataclass(frozen=True)
class PaddedBatcher:
    """Conversations → the model's inputs, `input_ids` [B, T] padded on the right and so on."""

    pad_token_id: int
    with_type_ids: bool

    @classmethod
    def for_processor(cls, processor: Any) -> PaddedBatcher:
        tokenizer = processor.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return cls(pad, "mm_token_type_ids" in processor.model_input_names)

    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, torch.Tensor]:
        length = max(map(len, rendered))
        inputs = {
            "input_ids": _pad([item.input_ids for item in rendered], length, self.pad_token_id),
            "attention_mask": _pad([[1] * len(item) for item in rendered], length, 0),
        }
        if self.with_type_ids:
            inputs["mm_token_type_ids"] = _pad([item.type_ids for item in rendered], length, 0)
        media = [medium for item in rendered for medium in item.media]
        for name in dict.fromkeys(name for medium in media for name in medium.tensors):
            inputs[name] = torch.cat([medium.tensors[name] for medium in media if name in medium.tensors])
        return inputs

    def cost(self, rendered: Sequence[Rendered]) -> int:
        """Tokens that the model computes for this batch, padding included."""
        return len(rendered) * max(map(len, rendered), default=0)


def _pad(rows: Sequence[Sequence[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.long)
