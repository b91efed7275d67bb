"""Run by test_fsdp in one process or two: FSDP2 without a GPU.

accelerate shards on accelerators alone, by the kind of its processes. That kind is all that is replaced here: torch's
own collectives run over gloo, and preparing, training, saving and resuming are accelerate's and transformers' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import Trainer

from tests.families.reference import rounding_nowhere, twins
from tests.families.table import FAMILIES
from vlmrm.training import main, train
from vlmrm.training.checks import CHECKS, check_engine
from vlmrm.training.engines import describe, reduce_all
from vlmrm.training.trainer import ComparisonTrainer


def shard(make):
    """Return `make`, which makes accelerate's state, with processes that it shards among."""

    def forced(*args, **kwargs):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return make(*args, **kwargs)

    return forced


def compare_gradients(model_type: str) -> None:
    """Compare a step in which the ranks take turns with texts and images with one process, in float64."""
    family = next(family for family in FAMILIES if family.model_type == model_type)
    model, alone, batches = twins(family)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    accelerator = shard(Accelerator)(fsdp_plugin=plugin, cpu=True)
    describe(plugin, model, model, None)
    sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    reduce_all(sharded, model)
    with rounding_nowhere():
        for step in range(2):
            sharded.zero_grad()
            sharded(**batches[(distributed.get_rank() + step) % 2]).logits.sum().backward()
        sum(alone(**batch).logits.sum() / 2 for batch in batches).backward()
    for (name, weight), expected in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(weight, DTensor), name
        assert weight.to_local().numel() < expected.numel() or expected.shape[0] == 1, name
        gradient = torch.zeros_like(expected) if weight.grad is None else weight.grad.full_tensor()
        wanted_gradient = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-8, atol=1e-12, msg=name)
    if distributed.get_rank() == 0:
        sys.stdout.write(f"{model_type} equal\n")


def watched(prepare):
    """Return `prepare`, which shards the model of a run, to say what each rank holds and what its head computes in."""

    def prepare_and_say(self, *args, **kwargs):
        prepared = prepare(self, *args, **kwargs)
        weights = list(prepared[0].parameters())
        share = sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)

        def say(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            types = {*(str(weight.dtype) for weight in module.parameters()), str(output.dtype)}
            said = {"share": share, "head": sorted(types), "hidden": str(inputs[0].dtype)}
            sys.stdout.write("RUN " + json.dumps(said) + "\n")
            handle.remove()

        handle = self.reward_model.score.register_forward_hook(say)
        return prepared

    return prepare_and_say


def run(
    rank: int, world: int, port: int, folder: Path, families: Sequence[str], runs: Sequence[Sequence[str]]
) -> None:
    """Compare `families`, then train with each of the words of `runs`; what is said goes into `folder`, by rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        open(folder / f"rank{rank}.txt", "w", buffering=1) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        distributed.init_process_group("gloo")
        for family in families:
            compare_gradients(family)
        main.CHECKS = tuple(check for check in CHECKS if check is not check_engine)
        Trainer.create_accelerator_and_postprocess = shard(Trainer.create_accelerator_and_postprocess)
        ComparisonTrainer._prepare_for_training = watched(ComparisonTrainer._prepare_for_training)
        for words in runs:
            train(words)
        distributed.destroy_process_group()
