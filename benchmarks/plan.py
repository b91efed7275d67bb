"""The time that `vlmrm plan` says, over what the training then takes, each in a process of its own.

It is that of the training's steps, in processor time, which does not depend on the machine's other processes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from benchmarks import harness
from benchmarks.harness import Row, row
from benchmarks.runs import base_model, picture_pairs, training_words, workplace

TIME_ERROR = 0.20
STEPS = 24
SIZE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 32}
# By case, the keys in which it differs.
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"use_peft": True},
}


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for case, keys in list(CASES.items())[-1 if options.quick else 0 :]:  # each opens two processes
        planned, taken = (harness.in_new_process(way, keys, options.quick) for way in (planned_seconds, real_seconds))
        details = {"planned_s": planned, "measured_s": taken}
        rows.append(row(f"{case}_seconds", abs(planned / taken - 1), "of measured", at_most=TIME_ERROR, **details))
    return rows


def training(folder: Path, keys: dict[str, Any], quick: bool) -> list[str]:
    """Write a model and pairs into `folder`, and return the words of the training."""
    torch.set_num_threads(1)
    model = base_model(folder / "model", quick, SIZE)
    data = picture_pairs(folder / "data", 40, pictures=20, size=(320, 240))
    steps = 4 if quick else STEPS
    shape = {"per_device_train_batch_size": 2, "max_steps": steps, "logging_steps": steps}
    return training_words(model, data, folder / "out", **{**shape, **keys})


def planned_seconds(keys: dict[str, Any], quick: bool) -> float:
    from vlmrm.training import plan as planning

    planning.perf_counter = time.process_time
    with workplace() as folder:
        plan = planning.plan_training(training(folder, keys, quick))
    assert plan.step_seconds is not None, plan.errors
    return plan.step_seconds * plan.steps


def real_seconds(keys: dict[str, Any], quick: bool) -> float:
    """Return the seconds of the steps."""
    from vlmrm import train

    seconds: list[float] = []
    trained = Trainer.train

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.process_time()
        result = trained(*arguments, **options)
        seconds.append(time.process_time() - started)
        return result

    Trainer.train = timed
    with workplace() as folder:
        train(training(folder, keys, quick))
    return seconds[0]


if __name__ == "__main__":
    harness.main("plan", measure, __doc__)
