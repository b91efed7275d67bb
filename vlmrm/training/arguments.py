"""The configuration keys of a training run: TRL's `RewardConfig`, extended."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
import trl
from torch.distributed import DistError

from vlmrm.config import Configuration, kinds_of, parse, written_keys
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError, first_line
from vlmrm.modeling.arguments import AUTO, ModelArguments
from vlmrm.modeling.parts import HEAD, MERGER, VISION
from vlmrm.settings import check_least, did_you_mean, key
from vlmrm.training.engines import (
    check_checkpointing,
    check_engine_files,
    check_environment,
    join_alone,
    read_engines,
)
from vlmrm.training.losses import PAIR_LOSSES

CHECKPOINTING = {AUTO: AUTO, "true": True, "false": False}  # words of gradient_checkpointing
RATES = {VISION: "vision_lr", MERGER: "merger_lr", HEAD: "head_lr"}  # keys of the parts' own learning rates


def check_launcher() -> None:
    """Refuse the environment of half a launcher, which torch would wait with or answer with a traceback."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not (value := os.environ.get(name, "0")).isdigit():
            raise ConfigError(f"{name} is {value!r} in the environment: it must be a whole number, or not be set.")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment without {' and '.join(missing)}: start the "
            "training with run_distributed.sh or torchrun, or unset it."
        )


@dataclass
class RewardTrainingArguments(trl.RewardConfig):
    """TRL's `RewardConfig`, and so HF's `TrainingArguments`, with the keys below; all others keep their meaning."""

    learning_rate: float = key(1e-5, "The initial learning rate.")
    vision_lr: float | None = key(None, "Learning rate of the vision tower. Default: `learning_rate`.")
    merger_lr: float | None = key(None, "Learning rate of the merger (projector). Default: `learning_rate`.")
    head_lr: float | None = key(None, "Learning rate of the head. Default: `learning_rate`.")
    use_irrelevant_queries: bool = key(
        False, "Also show the answers under another sample's prompt, where they should tie."
    )
    num_irrelevant_pairs: int = key(1, "Irrelevant prompts for each pair.")
    irrelevant_loss_weight: float = key(1.0, "Weight of the irrelevant loss.")
    pair_loss: str = key("bradley_terry", "Loss of a preference pair: `bradley_terry`, or one of a plugin.")
    router_aux_loss_coef: float = key(
        0.0, "Weight of the loss that spreads tokens evenly over the experts of a mixture of experts. 0: off."
    )
    probe_samples: int = key(
        64,
        "Rows of the evaluation set that each evaluation also scores with grey images and under other prompts, to log"
        " how much the model looks at them. 0: none.",
    )
    max_dropped_share: float = key(
        0.1,
        "Largest share of rows that may be left out (`overlong`, `bad_rows: skip`): a sample of the rows is read "
        "before the training, which does not start if more of them are.",
    )
    torch_compile: bool | None = key(  # ty: ignore[incompatible-attribute-override]
        None, "Compile each block around its attention. Default: of Qwen2.5-VL in bfloat16 on one GPU, from 200 steps."
    )
    gradient_checkpointing: str = key(  # ty: ignore[incompatible-attribute-override]
        AUTO,
        "Compute layers again in the backward pass: less memory, a third more time. `auto`: none, every fourth or "
        "second, or all, by the free memory.",
        **{"nargs": "?", "const": "true"},
    )
    # TRL's text-only key; conversations are measured by max_seq_length (DataArguments).
    max_length: int | None = key(None, "Not used: see max_seq_length.")
    remove_unused_columns: bool = key(False, "Not used: rows are comparisons, not columns.")

    if TYPE_CHECKING:  # HF declares the types of arguments, not those that its __post_init__ sets
        output_dir: Any = None
        report_to: Any = None
        accelerator_config: Any = None
        eval_strategy: Any = None

    def __post_init__(self):
        check_launcher()
        # A loss that is not finite ends the run anyway; the filter would wait for each.
        self.logging_nan_inf_filter = False
        if not self.use_cpu and not torch.accelerator.is_available():
            # Otherwise torchrun would start independent trainings, each with a world size of 1.
            self.use_cpu = True
        if self.max_length is not None:
            raise ConfigError(
                "max_length is TRL's key for texts: write max_seq_length, which counts image tokens too."
            )
        if self.remove_unused_columns:
            raise ConfigError("remove_unused_columns must stay false: comparisons are read from columns of any name.")
        if self.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
            raise ConfigError(
                f"train_sampling_strategy: {self.train_sampling_strategy} needs counts of tokens, "
                "which images lack before they are read: remove it."
            )
        if self.optim in ("lomo", "adalomo"):
            raise ConfigError(
                f"optim: {self.optim} changes weights inside each backward pass, and a step may have several: choose "
                "another, such as adafactor."
            )
        # Torch and HF would fail late or with a traceback, or train something else in silence.
        batches = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        check_least(self, 1, *batches, "num_irrelevant_pairs", "save_total_limit")
        optimizer = ("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "adam_beta1", "adam_beta2")
        check_least(
            self, 0, *optimizer, "warmup_steps", "seed", "data_seed", "dataloader_num_workers", "probe_samples"
        )
        losses = ("center_rewards_coefficient", "irrelevant_loss_weight", "router_aux_loss_coef")
        check_least(self, 0, *losses)
        # Steps below 1 are a share of all; a part that is not to learn is frozen.
        for name in ("logging_steps", "save_steps", "eval_steps", *RATES.values()):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}: it must be above 0.")
        if not 0 < self.max_dropped_share <= 1:
            raise ConfigError(f"max_dropped_share is {self.max_dropped_share}: it is a share, above 0 and at most 1.")
        if self.max_steps == 0 or (self.max_steps < 0 and not self.num_train_epochs > 0):
            raise ConfigError(
                f"max_steps is {self.max_steps} and num_train_epochs {self.num_train_epochs}, which is no step at "
                "all: set one of them to a number above 0."
            )
        if self.pair_loss not in PAIR_LOSSES:
            advice = did_you_mean(self.pair_loss, PAIR_LOSSES, f": choose from {', '.join(PAIR_LOSSES)}.")
            raise ConfigError(f"pair_loss is {self.pair_loss!r}, which there is not{advice}")
        for name in ("label_smoothing_factor", "neftune_noise_alpha"):
            if getattr(self, name):
                raise ConfigError(f"{name} changes nothing in the loss of preferences: remove it.")
        if self.fp16 and self.use_cpu:
            raise ConfigError("fp16 needs a GPU: remove it, or write bf16: true on a CPU that has bfloat16.")
        if (word := str(self.gradient_checkpointing).lower()) not in CHECKPOINTING:
            raise ConfigError(f"gradient_checkpointing is {word}: choose from {', '.join(CHECKPOINTING)}.")
        self.gradient_checkpointing: Any = CHECKPOINTING[word]
        read_engines(self)
        check_environment(self)
        join_alone(self)
        compiled, self.torch_compile = self.torch_compile, False  # HF would compile the model as a whole
        try:
            with warnings.catch_warnings():
                # TRL's defaults set the older name, which configurations use too.
                warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
                super().__post_init__()
        except DistError as error:
            raise ConfigError(
                f"the processes of this training cannot meet: {first_line(error).rstrip('.')}."
            ) from error
        self.torch_compile = compiled
        check_engine_files(self)
        check_checkpointing(self)
        # Every rank reads its own batches: handed out by the first, they would be cut along the wrong dimension.
        self.accelerator_config.dispatch_batches = False


@dataclass
class RewardConfig(RewardTrainingArguments, DataArguments, ModelArguments):
    """Every key of a configuration, flat as in its file: those of the model, of the data and of the training.

    >>> RewardConfig(output_dir="outputs/mine", learning_rate=1e-5, use_peft=True)
    """

    def __post_init__(self):
        for name, hint in get_type_hints(type(self)).items():
            kinds, value = kinds_of(hint), getattr(self, name, None)
            if isinstance(value, str) and kinds & {int, float} and str not in kinds:
                raise ConfigError(f"{name} is {value!r}: it must be a number.")
        ModelArguments.__post_init__(self)
        DataArguments.__post_init__(self)
        RewardTrainingArguments.__post_init__(self)


@dataclass(frozen=True)
class RunArguments:
    """All keys of one training; `written` are those that the user wrote, in the file or on the command line."""

    model: ModelArguments
    data: DataArguments
    training: RewardTrainingArguments
    written: frozenset[str]

    @classmethod
    def parse(cls, config: Configuration, program: str, **keys: Any) -> RunArguments:
        """Return the keys of a configuration, of which `keys` override some."""
        parsed = parse((ModelArguments, DataArguments, RewardTrainingArguments), config, program, **keys)
        return cls(*parsed, written=frozenset(written_keys(config) | keys.keys()))

    @classmethod
    def of(cls, model: ModelArguments, data: DataArguments, training: RewardTrainingArguments) -> RunArguments:
        """Return the keys of objects made in Python: those that differ from their defaults count as written.

        Not the evaluation set, which is also for `trainer.evaluate()`.
        """
        changed = {
            field.name
            for group in (model, data, training)
            for field in fields(group)
            if getattr(group, field.name)
            != (field.default if field.default_factory is MISSING else field.default_factory())
        }
        return cls(model, data, training, frozenset(changed - {"eval_dataset_path"}))

    def value(self, key: str) -> Any:
        groups = (self.model, self.data, self.training)
        return next(getattr(group, key) for group in groups if hasattr(group, key))
