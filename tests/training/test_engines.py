"""Engines and memory: every key that would change a run in silence is refused, and what stays trains as before."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.runs import ROOT
from vlmrm.config import parse
from vlmrm.errors import ConfigError
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.families import BY_MODEL_TYPE
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.checks import check_visible
from vlmrm.training.engines import compiles, engine_environment, join_alone


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """`arguments(**keys)` are those of a training with these keys; the environment is left as it was."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")

    def make(**keys) -> RewardTrainingArguments:
        config = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, **keys}
        return parse((RewardTrainingArguments,), config, "test")[0]

    return make


def zero1(**keys) -> str:
    return json.dumps({"zero_optimization": {"stage": 1}, **keys})


FSDP = {"fsdp": True}
CHECKPOINTED = FSDP | {"fsdp_config": {"activation_checkpointing": True}}


@pytest.mark.parametrize(
    ("keys", "keyword"),
    [
        ({"torch_compile_backend": "inductor"}, "torch_compile_backend: blocks are compiled by inductor"),
        ({"use_liger_kernel": True}, "use_liger_kernel: liger-kernel"),
        ({"activation_offloading": True}, "activation_offloading moves activations to the CPU"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, "offload moves activations to the CPU"),
        ({"activation_checkpointing_kwargs": {"every_n_layer": 2}}, "did you mean every_n_layers"),
        ({"deepspeed": zero1(sequence_parallel_size=2)}, "sequence_parallel_size: packed rows"),
        ({"deepspeed": zero1(tensor_parallel={"autotp_size": 2})}, "autotp_size: packed rows"),
        (FSDP | {"deepspeed": str(ROOT / "zero2.json")}, "fsdp and deepspeed both"),
        ({"fsdp": "hybrid_shard"}, "write fsdp: true"),
        (FSDP | {"fsdp_config": {"version": 1}}, "version is 1: it must be 2"),
        (FSDP | {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "must be FULL_STATE_DICT"),
        (FSDP | {"fsdp_config": {"cpu_offload": True}}, "fsdp_config has cpu_offload"),
        (FSDP | {"fsdp_config": "{version"}, "fsdp_config is {version, which is no mapping"),
        (FSDP | {"fsdp_config": "absent.json"}, "fsdp_config is absent.json, which is no mapping"),
        (CHECKPOINTED | {"gradient_checkpointing": True}, "are the same: remove one"),
        (CHECKPOINTED | {"gradient_checkpointing": False, "disable_dropout": False}, "draws other dropout"),
    ],
    ids=str,
)
def test_keys_that_would_change_a_run_are_refused(arguments, keys, keyword):
    with pytest.raises(ConfigError, match=re.escape(keyword)):
        arguments(**keys)


def test_sequence_parallelism_is_refused_as_an_object(tmp_path):
    with pytest.raises(ConfigError, match="parallelism_config: packed rows are not split along the sequence"):
        RewardTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, parallelism_config=ParallelismConfig(cp_size=2)
        )


@pytest.mark.parametrize(
    "variable", ["USE_PARALLELISM_CONFIG", "USE_FSDP", "USE_DEEPSPEED", "USE_MEGATRON_LM", "DYNAMO_BACKEND"]
)
def test_an_engine_of_the_environment_is_refused(arguments, monkeypatch, variable):
    value = "INDUCTOR" if variable == "DYNAMO_BACKEND" else "true"
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ConfigError, match=f"ACCELERATE_{variable} is set in the environment"):
        arguments()
    monkeypatch.setenv(f"ACCELERATE_{variable}", "no")
    arguments()


@pytest.mark.parametrize("word", ["full_shard", True])
def test_the_shipped_file_is_version_2_of_fsdp(arguments, word):
    args = arguments(fsdp=word, fsdp_config=str(ROOT / "fsdp2.json"), gradient_checkpointing=False)
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert plugin.fsdp_version == 2
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.reshard_after_forward and plugin.cpu_ram_efficient_loading


def test_a_run_restores_the_environment_it_sets(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with engine_environment():
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_DYNAMO_BACKEND": "inductor", "RANK": "0"}
    assert os.environ.keys().isdisjoint(["ACCELERATE_USE_FSDP", "RANK"])
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "no"


@pytest.mark.parametrize(("gpus", "keys", "ranks"), [(1, FSDP, 1), (1, {}, None), (8, FSDP, None)])
def test_an_engine_of_one_process_has_a_group_of_one(gpus, keys, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(distributed, "init_process_group", partial(distributed.init_process_group, "gloo"))
    args: Any = SimpleNamespace(**{"fsdp": None, "deepspeed": None, "use_cpu": False} | keys)
    try:
        with engine_environment():
            join_alone(args)
            assert (os.environ.get("LOCAL_RANK"), distributed.is_initialized()) == (ranks and "0", bool(ranks))
            assert not ranks or distributed.get_world_size() == ranks
        assert "LOCAL_RANK" not in os.environ
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_fsdp_of_one_process_that_has_no_group_is_refused():
    run: Any = SimpleNamespace(training=SimpleNamespace(n_gpu=1, fsdp=True, use_cpu=False))
    with pytest.raises(ConfigError, match="fsdp of one process needs a CUDA GPU"):
        check_visible(run)


def test_blocks_are_compiled_by_default_where_that_pays():
    engine = {"bf16": True, "world_size": 1, "fsdp": None, "deepspeed": None, "device": torch.device("cuda")}
    args: Any = SimpleNamespace(torch_compile=None, **engine)
    model: Any = SimpleNamespace(
        family=BY_MODEL_TYPE["qwen2_5_vl"], parameters=lambda: [torch.empty(2**31, device="meta")]
    )
    cases = {(False, 200): True, (False, 199): False, (True, 200): False}  # in 4 bits, steps
    for (four_bits, steps), expected in cases.items():
        keys = ModelArguments(load_in_4bit=four_bits, use_peft=True)
        assert compiles(keys, args, model, steps) is expected
