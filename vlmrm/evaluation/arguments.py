"""The keys of a checkpoint sweep; which data to read and how is in `DataArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmrm.errors import ConfigError
from vlmrm.evaluation.ablations import ABLATIONS


@dataclass
class EvaluationArguments:
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
    attn_implementation: str = field(
        default="auto",
        metadata={
            "help": "`flash_attention_2`, `sdpa`, or `auto`: flash attention where it is installed, else sdpa.",
            "choices": ["auto", "flash_attention_2", "sdpa"],
        },
    )
    batching: str = field(
        default="shared",
        metadata={
            "help": "`shared`: prompts and images that conversations have in common are computed once. `reference`: "
            "each conversation padded and computed whole; the scores are the same.",
            "choices": ["shared", "reference"],
        },
    )
    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Most text tokens and image patches computed at once; a larger batch goes through in parts, "
            "with the same result. Default: no limit."
        },
    )
    vision_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of a cache of images as the vision tower and merger see them: runs, sweeps and scorers "
            "may share it."
        },
    )
    vision_cache_gb: float = field(
        default=50.0,
        metadata={"help": "Size of `vision_cache_dir` in gigabytes; images used longest ago go first."},
    )
    ablations: list[str] = field(
        default_factory=lambda: list(ABLATIONS),
        metadata={
            "help": "What to score beside every comparison, to see what the preference rests on: blank_image, "
            "swapped_image, swapped_prompt, response_only; or none."
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
