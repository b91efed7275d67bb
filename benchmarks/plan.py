"""What `vlmrm plan` says of memory and time, over what the training then takes, each in a process of its own.

Memory is the rise of the resident memory's peak; time is that of the training's steps, evaluations and saves, in
processor time, which does not depend on the machine's other processes.
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

MEMORY_ERROR, TIME_ERROR = 0.10, 0.20
STEPS = 24
SIZE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 32}
# By case, the keys in which it differs.
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"use_peft": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 12, "save_strategy": "steps", "save_steps": 12},
}


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for case, keys in list(CASES.items())[-1 if options.quick else 0 :]:  # each opens two processes
        planned, taken = (harness.in_new_process(way, keys, options.quick) for way in (planned_figures, real_figures))
        for figure, unit, bound in (("memory", "MB", MEMORY_ERROR), ("seconds", "s", TIME_ERROR)):
            error = abs(planned[figure] / taken[figure] - 1)
            details = {f"planned_{unit}": planned[figure], f"measured_{unit}": taken[figure]}
            rows.append(row(f"{case}_{figure}", error, "of measured", at_most=bound, **details))
    return rows


def training(folder: Path, keys: dict[str, Any], quick: bool) -> list[str]:
    """Write a model and pairs into `folder`, and return the words of the training."""
    torch.set_num_threads(1)
    model = base_model(folder / "model", quick, SIZE)
    data = picture_pairs(folder / "data", 40, pictures=20, size=(320, 240))
    steps = 4 if quick else STEPS
    shape = {"per_device_train_batch_size": 2, "max_steps": steps, "logging_steps": steps}
    if "eval_strategy" in keys:
        shape["eval_dataset_path"] = picture_pairs(folder / "held_out", 16, pictures=8, size=(320, 240))
    return training_words(model, data, folder / "out", **{**shape, **keys})


def planned_figures(keys: dict[str, Any], quick: bool) -> dict[str, float]:
    from vlmrm.training import plan as planning

    planning.perf_counter = time.process_time
    with workplace() as folder:
        plan = planning.plan_training(training(folder, keys, quick))
    assert plan.memory is not None and plan.timing is not None, plan.errors
    return {"memory": plan.memory.total / 2**20, "seconds": plan.timing.total}


def real_figures(keys: dict[str, Any], quick: bool) -> dict[str, float]:
    """Return the rise of memory from before the model is opened, and the seconds of the steps."""
    from vlmrm import train
    from vlmrm.training import main

    before: list[float] = []
    seconds: list[float] = []
    build, trained = main.build_model, Trainer.train

    def build_model(*arguments: Any) -> Any:
        before.append(harness.memory())
        return build(*arguments)

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.process_time()
        result = trained(*arguments, **options)
        seconds.append(time.process_time() - started)
        return result

    main.build_model, Trainer.train = build_model, timed
    with workplace() as folder:
        train(training(folder, keys, quick))
    return {"memory": harness.peak_memory() - before[0], "seconds": seconds[0]}


if __name__ == "__main__":
    harness.main("plan", measure, __doc__)
