"""The keys of a checkpoint sweep; which data to read and how is in `DataArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmrm.errors import ConfigError
from vlmrm.evaluation.ablations import ABLATIONS
from vlmrm.modeling.arguments import ComputeArguments


@dataclass
class EvaluationArguments(ComputeArguments):
    model_dirs: list[str] = field(
        default_factory=list, metadata={"help": "Training output folders, or checkpoints themselves."}
    )
    checkpoint_pattern: str = field(
        default="checkpoint-*", metadata={"help": "Which folders inside each of `model_dirs` are checkpoints."}
    )
    base_model_path: str | None = field(
        default=None,
        metadata={"help": "Base of adapter checkpoints, and processor of checkpoints saved without one."},
    )
    eval_batch_size: int = field(default=8, metadata={"help": "Comparisons in a batch."})
    output_file: str = field(
        default="evaluation_results.csv", metadata={"help": "The results table; the details go beside it as .json."}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Type of the weights; `auto` keeps the checkpoint's.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    ablations: list[str] = field(
        default_factory=lambda: list(ABLATIONS),
        metadata={
            "help": "What to score beside every comparison, to see what the preference rests on: blank_image, "
            "swapped_image, swapped_prompt, response_only; or none."
        },
    )
    benchmark: str | None = field(
        default=None,
        metadata={
            "help": "A public benchmark by name, scored by its authors' rule: vl-rewardbench, hpdv3, ...; "
            "`dataset_path` may name a local copy of it."
        },
    )
    group_by: list[str] = field(
        default_factory=list, metadata={"help": "Columns of the data whose values get figures of their own."}
    )
    fail_under: float | None = field(
        default=None, metadata={"help": "Exit with status 6 when no checkpoint's accuracy reaches this."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that open and process images."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("model_dirs", "ablations", "group_by"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        self.ablations = [name for name in self.ablations if name != "none"]
        for name in self.ablations:
            if name not in ABLATIONS:
                raise ConfigError(f"ablations names {name!r}: choose from {', '.join(ABLATIONS)}, or none.")
        if self.fail_under is not None and not 0 <= self.fail_under <= 1:
            raise ConfigError(f"fail_under is {self.fail_under}: it is an accuracy, from 0 to 1.")
        if not self.model_dirs:
            raise ConfigError("model_dirs is missing: name at least one training output folder or checkpoint.")
        if self.eval_batch_size < 1:
            raise ConfigError(f"eval_batch_size is {self.eval_batch_size}: it must be at least 1.")
        if not self.output_file.endswith(".csv"):
            raise ConfigError(f"output_file is {self.output_file}: it must end in .csv (the .json goes beside it).")
