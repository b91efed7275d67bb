"""A small training with its loader, over the same steps alone: wall-clock seconds per step.

The training reads a file, opens pictures in one worker and logs; the steps alone find their batches ready-made.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from vlmrm.modeling import load_for_training, load_processor
from vlmrm.training import train
from vlmrm.training.losses import Objective, judged_weights

PAIRS, BATCH = 160, 4
LIMIT = 1.10
ROUNDS = 3


def measure(options: argparse.Namespace) -> list[Row]:
    pairs = 8 if options.quick else PAIRS
    epochs, alone = [], []
    with runs.workplace() as folder:
        base = runs.base_model(folder / "base", options.quick)
        data = runs.picture_pairs(folder / "data", pairs, pictures=pairs)
        steps = Steps(base, data)
        for number in range(1 if options.quick else ROUNDS):
            alone.append(steps.seconds())
            epochs.append(epoch_seconds(base, data, folder / f"training-{number}") / steps.count)
    ratios = [epoch / step for epoch, step in zip(epochs, alone, strict=True)]
    line = row("step", statistics.median(ratios), "x step alone", at_most=LIMIT)
    line |= {"lowest": min(ratios), "highest": max(ratios), "steps": steps.count}
    line |= {"epoch_step_seconds": statistics.median(epochs), "step_alone_seconds": statistics.median(alone)}
    return [line]


def epoch_seconds(base: Path, data: Path, output: Path) -> float:
    """Return the wall-clock seconds of an epoch of the trainer, from the start of its loop to its end."""
    keys = {"per_device_train_batch_size": BATCH, "num_train_epochs": 1, "logging_steps": 10}
    result = train(runs.training_words(base, data, output, dataloader_num_workers=1, **keys))
    return result.metrics["train_runtime"]


class Steps:
    """The steps of the same training by hand: forward, loss, backward, clipping, optimizer."""

    def __init__(self, base: Path, data: Path):
        self.model = load_for_training(base, dtype=torch.float32, attn_implementation="sdpa", seed=0).train()
        self.batches = runs.batches(runs.collator(self.model, load_processor(base)), data, BATCH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.loss = Objective()

    @property
    def count(self) -> int:
        return len(self.batches)

    def seconds(self) -> float:
        """Return the wall-clock seconds of a step, the mean over all batches."""
        started = time.perf_counter()
        for part in itertools.chain.from_iterable(batch["parts"] for batch in self.batches):
            scores = self.model(**part["inputs"][0]).logits
            losses = self.loss(scores, part["pairs"], judged_weights(part["pairs"]))
            torch.stack(list(losses.values())).sum().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - started) / self.count


if __name__ == "__main__":
    harness.main("epoch", measure, __doc__)
