"""Figures of the training log: sums over the steps of each process, and their means over all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from vlmrm.batching import Part

# Names are TRL's where TRL has one.
SUMMED = (
    *("pairs", "correct", "margin", "rewards", "reward", "irrelevant_pairs", "irrelevant_margin"),
    *("loss_preference", "loss_irrelevant", "loss_center", "loss_router", "dropped_rows"),
)


class StepFigures:
    """Sum the figures of the training log over steps on each rank; `flush` returns their means over all ranks."""

    def __init__(self) -> None:
        self.flushed = 0, 0  # correct pairs, and pairs, of the last line
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(SUMMED, 0.0)
        self.lowest, self.highest = math.inf, -math.inf
        self.steps = self.tokens = self.pairs = 0
        self.waited = 0.0  # seconds spent waiting for batches
        self.since = time.perf_counter()

    def start_step(self, tokens: int, pairs: int) -> None:
        """Count one optimizer step over all ranks."""
        self.steps += 1
        self.tokens += tokens
        self.pairs += pairs

    def add(self, scores: torch.Tensor, part: Part, terms: Mapping[str, torch.Tensor], loss: torch.Tensor) -> float:
        """Add the scores[B] of one part of a batch and the terms of its loss; return the loss."""
        scores, pairs = scores.float(), part["pairs"]
        difference = scores[pairs["chosen"]] - scores[pairs["rejected"]]
        irrelevant = pairs["irrelevant"]
        judged = ~(irrelevant | pairs["tie"] | pairs["outvoted"])
        own = torch.arange(len(scores), device=scores.device) < part["rows"]["branches"].sum()
        sums = {
            "pairs": judged.sum(),
            "rewards": own.sum(),
            "irrelevant_pairs": irrelevant.sum(),
            "correct": (judged & (difference > 0)).sum(),
            "margin": torch.where(judged, difference, 0).sum(),
            "reward": torch.where(own, scores, 0).sum(),  # without those of irrelevant queries
            "irrelevant_margin": torch.where(irrelevant, difference, 0).sum(),
            **{f"loss_{name}": term for name, term in terms.items()},
        }
        extremes = [torch.where(own, scores, math.inf).min(), torch.where(own, scores, -math.inf).max()]
        # One transfer from the device for all of them: here the host waits for what the pass has computed.
        values = torch.stack([value.detach().float() for value in (*sums.values(), *extremes, loss)]).tolist()
        for name, value in zip(sums, values, strict=False):
            self.sums[name] += value
        *_, lowest, highest, value = values
        self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
        return value

    def flush(self, accelerator) -> dict[str, float]:
        """Return means over the steps since the last call and over all ranks. Every rank must call it."""
        seconds = max(time.perf_counter() - self.since, 1e-9)
        local = torch.tensor(list(self.sums.values()), device=accelerator.device)
        total = dict(zip(SUMMED, accelerator.reduce(local, "sum").tolist(), strict=True))
        extremes = accelerator.gather(torch.tensor([self.lowest, self.highest], device=accelerator.device)).view(-1, 2)
        figures = {
            "accuracy": total["correct"] / max(total["pairs"], 1),
            "margin": total["margin"] / max(total["pairs"], 1),
            "mean_reward": total["reward"] / max(total["rewards"], 1),
            "min_reward": extremes[:, 0].min().item(),
            "max_reward": extremes[:, 1].max().item(),
            "tokens_per_second": self.tokens / seconds,
            "pairs_per_second": self.pairs / seconds,
            "data_wait": self.waited / seconds,
            "dropped_rows": total["dropped_rows"],
        }
        # Each rank has its share of a step's mean loss, so the shares add up.
        if total["irrelevant_pairs"] or total["loss_center"] or total["loss_router"]:
            parts = [name for name in SUMMED if name.startswith("loss_") and (total[name] or name != "loss_router")]
            figures |= {name: total[name] / max(self.steps, 1) for name in parts}
        if total["irrelevant_pairs"]:
            figures["irrelevant_margin"] = total["irrelevant_margin"] / total["irrelevant_pairs"]
        self.flushed = int(total["correct"]), int(total["pairs"])
        self._reset()
        return figures
