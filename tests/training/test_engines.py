"""Engines and memory: every key that would change a run in silence is refused, and what stays trains as before."""

from __future__ import annotations

import itertools
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from runs import ROOT, assert_equal_weights, colour_lists
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import modeling_utils
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from vlmrm.config import parse
from vlmrm.errors import ConfigError
from vlmrm.modeling import load_for_training
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.engines import ENGINES, check_combination, describe, engine_environment
from vlmrm.training.optimizer import check_optimizer
from vlmrm.training.trainer import ComparisonTrainer


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


REFUSED_KEYS = [
    ("compiled", {"torch_compile": True}, "torch_compile: a compiled model does not outlast a batch"),
    ("backend", {"torch_compile_backend": "inductor"}, "torch_compile_backend: a compiled model"),
    ("mode", {"torch_compile_mode": "max-autotune"}, "torch_compile_mode: a compiled model"),
    ("liger", {"use_liger_kernel": True}, "use_liger_kernel: liger-kernel, 0.8.5 the newest, does not import"),
    ("offloading", {"activation_offloading": True}, "activation_offloading moves activations to the CPU"),
    ("offload", {"activation_checkpointing_kwargs": {"offload": True}}, "offload moves activations to the CPU"),
    ("typo", {"activation_checkpointing_kwargs": {"every_n_layer": 2}}, "did you mean every_n_layers"),
    (
        "Ulysses",
        {"deepspeed": zero1(sequence_parallel_size=2)},
        "sequence_parallel_size: packed rows are not split",
    ),
    (
        "tensors",
        {"deepspeed": zero1(tensor_parallel={"autotp_size": 2})},
        "autotp_size: packed rows",
    ),
    ("two engines", {"fsdp": True, "deepspeed": str(ROOT / "zero2.json")}, "fsdp and deepspeed both"),
    ("old word", {"fsdp": "hybrid_shard"}, "fsdp is hybrid_shard: write fsdp: true"),
    ("FSDP1", {"fsdp": True, "fsdp_config": {"version": 1}}, "version is 1: it must be 2"),
    ("shards", {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "must be FULL_STATE_DICT"),
    ("offloaded", {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "fsdp_config has cpu_offload"),
    ("no JSON", {"fsdp": True, "fsdp_config": "{version"}, "fsdp_config is no JSON"),
    ("absent file", {"fsdp": True, "fsdp_config": "absent.json"}, "fsdp_config names absent.json"),
    ("twice", {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "are the same: remove one"),
    (
        "dropout",
        {
            **{"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
            **{"gradient_checkpointing": False, "disable_dropout": False},
        },
        "draws other dropout",
    ),
]


@pytest.mark.parametrize(
    ("keys", "sentence"), [case[1:] for case in REFUSED_KEYS], ids=[case[0] for case in REFUSED_KEYS]
)
def test_keys_that_would_change_a_run_are_refused(arguments, keys, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        arguments(**keys)


def test_sequence_parallelism_is_refused_as_an_object(tmp_path):
    with pytest.raises(ConfigError, match="parallelism_config: packed rows are not split along the sequence"):
        RewardTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, parallelism_config=ParallelismConfig(cp_size=2)
        )


@pytest.mark.parametrize(
    "variable",
    ["USE_PARALLELISM_CONFIG", "USE_FSDP", "USE_DEEPSPEED", "USE_MEGATRON_LM", "DYNAMO_BACKEND"],
)
def test_an_engine_of_the_environment_is_refused(arguments, monkeypatch, variable):
    value = "INDUCTOR" if variable == "DYNAMO_BACKEND" else "true"
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ConfigError, match=f"ACCELERATE_{variable} is set in the environment"):
        arguments()
    monkeypatch.setenv(f"ACCELERATE_{variable}", "no")
    arguments()


@pytest.mark.parametrize("word", ["true", "full_shard", True])
def test_the_shipped_file_is_version_2_of_fsdp(arguments, tmp_path, monkeypatch, word):
    config = tmp_path / "configs" / "config.yaml"
    config.parent.mkdir()
    config.write_text(
        f"fsdp: {str(word).lower()}\nfsdp_config: fsdp2.json\noutput_dir: out\ngradient_checkpointing: false"
    )
    (tmp_path / "fsdp2.json").write_text((ROOT / "fsdp2.json").read_text())
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    [args] = parse((RewardTrainingArguments,), str(config), "test")
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert plugin.fsdp_version == 2
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.reshard_after_forward and plugin.cpu_ram_efficient_loading
    assert plugin.mixed_precision_policy is None


def test_layers_of_the_family_are_sharded_apart_and_the_head_is_not_rounded(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    model = load_for_training(tiny_checkpoint, head="mlp", dtype=torch.float32)
    model._no_split_modules = {*model._no_split_modules, "CLIPTextEmbeddings"}  # of another model of the family
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    describe(plugin, model, model, torch.bfloat16)
    plugin.set_mixed_precision("bf16")  # as accelerate does when it makes its state
    assert plugin.transformer_cls_names_to_wrap == ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert not policy.cast_forward_inputs
    kept = {name for name, weight in model.named_parameters() if policy.param_dtype_override_fn(weight) is not None}
    assert kept == {"score.weight", "score_hidden.0.weight", "score_hidden.0.bias"}


# Activations ---------------------------------------------------------------------------------------------------------


def test_offloaded_and_half_checkpointed_activations_give_equal_weights(train_here, tmp_path, monkeypatch):
    """TRL's own offloading, of which the CPU has all but the streams: what is saved for backward is moved and back.

    Then transformers' checkpointing of every second layer, offloaded too.
    """
    keys = {"use_irrelevant_queries": True, "max_tokens_per_batch": 80, "max_steps": 1}
    data = colour_lists(tmp_path / "data", 2)
    checkpointed: list[object] = []
    checkpoint = modeling_utils.checkpoint

    def count_layers(function, *args, **kwargs):
        checkpointed.append(function)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "checkpoint", count_layers)
    plain = train_here(data, "plain", **keys | {"gradient_checkpointing": True}).model_dir
    of_all = len(checkpointed)

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cpu"))
        context = get_act_offloading_ctx_manager(
            load_for_training(plain),
            use_pin_memory=False,
            use_streams=False,
            min_offload_size=1,
            warn_if_no_head=False,
        )
    moved, left = [], []
    prepare, step, pack = ComparisonTrainer._prepare_for_training, ComparisonTrainer.training_step, context.pack_hook

    def prepare_and_offload(self, *args, **kwargs):
        context.update_model_params(self.model)
        self.maybe_activation_offload_context = context
        return prepare(self, *args, **kwargs)

    def step_and_look(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        left.append(len(context.tracker))
        return loss

    def count_moved(tensor):
        number = pack(tensor)
        moved.append(context.tracker[number][1])
        return number

    context.pack_hook = count_moved
    monkeypatch.setattr(ComparisonTrainer, "_prepare_for_training", prepare_and_offload)
    monkeypatch.setattr(ComparisonTrainer, "training_step", step_and_look)
    assert_equal_weights(plain, train_here(data, "offloaded", **keys).model_dir)
    assert sum(moved) > 100
    checkpointed.clear()
    half = {"gradient_checkpointing": True, "activation_checkpointing_kwargs": '{"every_n_layers": 2}'}
    assert_equal_weights(plain, train_here(data, "half", **keys | half).model_dir)
    assert 0 < len(checkpointed) == of_all / 2
    assert left == [0, 0]  # a tensor that no backward took back would end the next pass


def test_a_run_takes_back_what_it_sets_in_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with engine_environment():
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_DYNAMO_BACKEND": "inductor"}
    assert "ACCELERATE_USE_FSDP" not in os.environ and os.environ["ACCELERATE_DYNAMO_BACKEND"] == "no"


# The matrix of docs/training.md --------------------------------------------------------------------------------------

PARTS = {
    "full": {},
    "LoRA": {"use_peft": True},
    "QLoRA": {"use_peft": True, "load_in_4bit": True},
    "frozen tower": {"freeze_vit": True},
    "ranks with and without images": {},
    "vision_cache_dir": {"freeze_vit": True, "vision_cache_dir": "features"},
    "activation_offloading": {"activation_offloading": True},
    "optim of bitsandbytes": {"optim": "paged_adamw_8bit"},
    "optim of torchao": {"optim": "adamw_torch_4bit"},
    "max_tokens_per_batch": {"max_tokens_per_batch": 4096},
    "fp16": {"fp16": True},
}


def matrix() -> dict[tuple[str, str], str]:
    """Return the cells of the table of docs/training.md by part and engine."""
    lines = (ROOT / "docs" / "training.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| |") and "FSDP2" in line)
    engines = [cell.strip() for cell in lines[start].split("|")[2:-1]]
    assert tuple(engines) == ENGINES
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {(row[0], engine): cell for row in cells for engine, cell in zip(engines, row[1:], strict=True)}


def test_the_matrix_of_engines_is_what_the_checks_refuse(monkeypatch):
    """On a machine with GPUs and every library: what is refused here is refused there."""
    monkeypatch.setattr("transformers.Trainer.get_optimizer_cls_and_kwargs", lambda args: None)
    cells = matrix()
    assert {part for part, _ in cells} == PARTS.keys()
    for (part, engine), cell in cells.items():
        stage = int(engine[-1]) if engine.startswith("ZeRO") else None
        values = dict.fromkeys(("deepspeed", "fsdp")) | PARTS[part]
        fields = {**dict.fromkeys(("vision_cache_dir", "load_in_4bit")), **values}
        args = SimpleNamespace(
            **{"fp16": False, "activation_offloading": False, "optim": "adamw_torch", **fields}
            | {"fsdp": engine == "FSDP2" or None, "deepspeed": engine if stage else None},
            hf_deepspeed_config=SimpleNamespace(
                get_value=lambda key, default=None, stage=stage: stage if "stage" in key else default
            ),
        )
        refused = False
        try:
            check_combination(args, args)
            check_optimizer(args, ())
        except ConfigError:
            refused = True
        assert refused == (cell == "refused"), (part, engine)
