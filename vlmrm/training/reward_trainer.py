"""`vlmrm.RewardTrainer`: TRL's quick start for vision-language models, the training of `vlmrm train` as an object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import RewardConfig as TRLRewardConfig

from vlmrm.data.tables import InMemory
from vlmrm.errors import ConfigError
from vlmrm.files import require_new_folder
from vlmrm.training.arguments import RewardConfig, RunArguments
from vlmrm.training.folder import checkpoint_to_resume, output_lock
from vlmrm.training.main import Run, TrainingResult, model_dir_of
from vlmrm.training.trainer import ComparisonTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback


class RewardTrainer(ComparisonTrainer):
    """Trains a vision-language reward model on a data set in memory, as `vlmrm train` does on files.

        trainer = RewardTrainer(model="Qwen/Qwen2.5-VL-3B-Instruct", train_dataset=dataset)
        trainer.train()

    Args:
        model: hub id or folder of the checkpoint to start from; its processor comes with it.
        args: every other key; `output_dir` is `NAME-Reward` by default.
        train_dataset: preferences in any layout of docs/data.md; without it, those of `args.dataset_path`. Its
            relative paths of images start from `args.image_root`, or the working directory.
        eval_dataset: held-out preferences; without it, those of `args.eval_dataset_path` or `eval_fraction`.
        callbacks: more of HF's callbacks.
        peft_config: the same as `use_peft` with the keys `lora_...`.
    """

    args: RewardConfig  # ty: ignore[incompatible-mutable-override]

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: RewardConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: LoraConfig | None = None,
    ):
        args = _completed(args, model, train_dataset, eval_dataset, peft_config)
        self.run = run = Run(RunArguments.of(args, args, args))
        run.check()
        with output_lock(args):
            checkpoint_to_resume(args)  # refuses a folder with an earlier run before the model is opened
        run.trainer = self
        run.open(super().__init__, callbacks=callbacks)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainingResult:  # ty: ignore[incompatible-method-override]
        """Train, and save the model in `output_dir/final`, or with `load_best_model_at_end` in `output_dir/best`.

        Args:
            resume_from_checkpoint: `auto` or True: the newest complete checkpoint; or a checkpoint's folder.
        """
        self.run.start_log()
        if resume_from_checkpoint is not None:
            self.args.resume_from_checkpoint = str(resume_from_checkpoint)
        with output_lock(self.args):
            if self.run.resume():
                self.run.train()
            return self.run.close()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a complete checkpoint: in a new folder, or where `train` saves it."""
        if _internal_call:
            return super().save_model(output_dir, _internal_call=True)
        folder, saved_by_train = Path(output_dir or self.args.output_dir), model_dir_of(self.args)
        if folder.resolve() == Path(self.args.output_dir).resolve():
            folder = saved_by_train
        if folder != saved_by_train:
            require_new_folder(folder, "the model")
        self.save_final(folder)


def _completed(
    args: RewardConfig | None,
    model: str | os.PathLike[str],
    train_dataset: Any,
    eval_dataset: Any,
    peft_config: LoraConfig | None,
) -> RewardConfig:
    """Return `args`, or the defaults, with the model, the data sets and the adapter that were passed beside them."""
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model is a {type(model).__name__}: pass the hub id or the folder of a checkpoint.")
    name = os.fspath(model)
    if args is None:
        args = RewardConfig(output_dir=f"{Path(name).name}-Reward")
    if not isinstance(args, RewardConfig):
        kind = "TRL's RewardConfig" if isinstance(args, TRLRewardConfig) else f"a {type(args).__name__}"
        raise ConfigError(f"args is {kind}: make it with `from vlmrm import RewardConfig`.")
    for key, table in (("dataset_path", train_dataset), ("eval_dataset_path", eval_dataset)):
        if table is not None:
            if getattr(args, key):
                raise ConfigError(f"{key} of args and a data set are both given: remove one.")
            setattr(args, key, [InMemory.of(table, "train_dataset" if key == "dataset_path" else "eval_dataset")])
    if args.model_name_or_path not in ("", name):
        raise ConfigError(f"model is {name}, and model_name_or_path of args {args.model_name_or_path}: remove one.")
    args.model_name_or_path = name
    if peft_config is not None:
        _adopt(args, peft_config)
    return args


def _adopt(args: RewardConfig, peft_config: LoraConfig) -> None:
    """Set the keys of LoRA to the values of a `LoraConfig`."""
    from peft import LoraConfig

    keys = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    plain = LoraConfig(task_type=peft_config.task_type, target_modules=peft_config.target_modules)
    different = [
        name for name, value in vars(plain).items() if getattr(peft_config, name) != value and name not in keys
    ]
    if different:
        raise ConfigError(f"peft_config sets {different[0]}, for which there is no key: remove it.")
    args.use_peft = True
    for name, key in keys.items():
        setattr(args, key, getattr(peft_config, name))
    if isinstance(peft_config.target_modules, str) and peft_config.target_modules != "all-linear":
        raise ConfigError("target_modules is a pattern: list the names of the layers.")
    modules = peft_config.target_modules
    args.lora_target_modules = None if modules is None or isinstance(modules, str) else sorted(modules)
