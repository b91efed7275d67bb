"""The figures of the training log: sums over steps on each rank, made means over all ranks when logged."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from vlmrm.batching import Part


class StepFigures:
    """Adds up what the steps since the last log did. Names are TRL's where TRL has one."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(
            ("pairs", "correct", "margin", "rewards", "reward", "irrelevant_pairs", "irrelevant_margin"), 0.0
        )
        self.parts: dict[str, float] = {"preference": 0.0, "irrelevant": 0.0, "center": 0.0}
        self.lowest, self.highest = math.inf, -math.inf
        self.steps = self.tokens = self.pairs = self.dropped = 0
        self.waited = 0.0  # seconds in which the step had no batch
        self.since = time.perf_counter()

    def start_step(self, tokens: int, pairs: int) -> None:
        """Counts of one optimizer step over all ranks."""
        self.steps += 1
        self.tokens += tokens
        self.pairs += pairs

    def add(self, scores: torch.Tensor, part: Part, parts: Mapping[str, torch.Tensor]) -> None:
        """The scores[B] of one part of a batch and the parts of its loss. One transfer from the device."""
        scores, pairs = scores.float(), part["pairs"]
        difference = scores[pairs["chosen"]] - scores[pairs["rejected"]]
        margins = difference[~pairs["irrelevant"] & ~pairs["tie"]]
        irrelevant = difference[pairs["irrelevant"]]
        own = scores[: int(part["rows"]["branches"].sum())]
        sums = [(margins > 0).sum(), margins.sum(), own.sum(), irrelevant.sum(), *parts.values()]
        if len(own):
            sums += [own.min(), own.max()]
        correct, margin, reward, irrelevant_margin, *rest = torch.stack([x.float() for x in sums]).tolist()
        for name, value in {
            "pairs": len(margins),
            "correct": correct,
            "margin": margin,
            "rewards": len(own),
            "reward": reward,
            "irrelevant_pairs": len(irrelevant),
            "irrelevant_margin": irrelevant_margin,
        }.items():
            self.sums[name] += value
        for name, value in zip(parts, rest, strict=False):
            self.parts[name] += value
        if len(own):
            self.lowest, self.highest = min(self.lowest, rest[-2]), max(self.highest, rest[-1])

    def flush(self, accelerator) -> dict[str, float]:
        """Means over the steps and ranks since the last call. Every rank must call it."""
        seconds = max(time.perf_counter() - self.since, 1e-9)
        local = {**self.sums, **{f"loss_{name}": value for name, value in self.parts.items()}, "dropped": self.dropped}
        summed = accelerator.reduce(torch.tensor(list(local.values()), device=accelerator.device), "sum").tolist()
        extremes = accelerator.gather(torch.tensor([self.lowest, self.highest], device=accelerator.device)).view(-1, 2)
        total = dict(zip(local, summed, strict=True))
        figures = {
            "accuracy": total["correct"] / max(total["pairs"], 1),
            "margin": total["margin"] / max(total["pairs"], 1),
            "mean_reward": total["reward"] / max(total["rewards"], 1),
            "min_reward": extremes[:, 0].min().item(),
            "max_reward": extremes[:, 1].max().item(),
            "tokens_per_second": self.tokens / seconds,
            "pairs_per_second": self.pairs / seconds,
            "data_wait": self.waited / seconds,
            "dropped_rows": total["dropped"],
        }
        # Each rank holds its share of a step's mean, so the shares add up.
        if total["irrelevant_pairs"] or total["loss_center"]:
            figures |= {f"loss_{name}": total[f"loss_{name}"] / max(self.steps, 1) for name in self.parts}
        if total["irrelevant_pairs"]:
            figures["irrelevant_margin"] = total["irrelevant_margin"] / total["irrelevant_pairs"]
        self._reset()
        return figures
