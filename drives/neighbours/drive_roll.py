"""ROLL: its reward scheduler and cluster of two Ray workers, which are those of examples/frameworks."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from checks import QUESTION, Case, begin_ray, main, raised, recipe, scored
from roll.configs import ModelArguments
from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.scheduler.reward_scheduler import RewardScheduler
from transformers import AutoTokenizer

Rows = list[tuple[str, str]]


@cache
def resources() -> ResourceManager:
    return ResourceManager(num_gpus_per_node=0, num_nodes=1)


@cache
def cluster(case: Case, url: str) -> Cluster:
    """Two workers, begun as its pipelines begin those of a reward."""
    os.environ["PYTHONPATH"] = os.pathsep.join([case.folder, os.environ["PYTHONPATH"]])
    worker = recipe("roll_worker", url, case.folder).People
    name = f"people_{len(sys.modules)}"
    made = Cluster(name, worker, resources(), WorkerConfig(name=name, world_size=2))
    policy = SimpleNamespace(model_args=ModelArguments(model_name_or_path=case.policy))
    made.initialize(pipeline_config=SimpleNamespace(actor_train=policy, resume_from_checkpoint=False), blocking=True)
    return made


def rewards(case: Case, url: str, rows: Rows) -> list[float]:
    """The rewards of responses, as its rollouts leave them."""
    tokenizer = AutoTokenizer.from_pretrained(case.policy, padding_side="right")
    answers = tokenizer([answer for _, answer in rows], padding=True, return_tensors="pt")["input_ids"]
    columns = {
        "question": [f"<image>{QUESTION}"] * len(rows),
        "images": [[picture] for picture, _ in rows],
        "domain": ["people"] * len(rows),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(rows), dtype=object)
        arrays[name][:] = values
    data = DataProto.from_dict(tensors={"responses": answers}, non_tensors=arrays)
    computed = RewardScheduler().compute_rewards(data, {"people": cluster(case, url)}, None)
    return asyncio.run(computed).batch["response_level_rewards"].tolist()


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    return [scored(*row, value) for row, value in zip(rows, rewards(case, case.url, rows), strict=True)]


def ranks(case: Case) -> list[dict[str, Any]]:
    """Each picture's answers are on both workers."""
    rows = case.rows()[::2] + case.rows()[1::2]
    return [scored(*row, value) for row, value in zip(rows, rewards(case, case.url, rows), strict=True)]


def broken(case: Case) -> str:
    rows = case.rows()
    rows[3] = (case.broken, rows[3][1])
    return raised(lambda: rewards(case, case.url, rows), "RewardError", "sample 1")


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away, case.rows()), "RewardError", case.away)


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin_ray()
    main({"equal": equal, "ranks": ranks, "broken": broken, "away": away})
