"""The configuration keys of preference data, for training, evaluation and `check-data`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self, cast

from vlmrm.data.columns import CRITIQUE, Columns, parse_columns, parse_names, read_columns
from vlmrm.errors import ConfigError
from vlmrm.formats.verdicts import FIGURES
from vlmrm.outputs import Outputs
from vlmrm.settings import check_least, key

logger = logging.getLogger("vlmrm")

LEAST_PIXELS = 28 * 28  # of one token of the Qwen family
# The keys that decide what a model is shown of a row, and their defaults: a checkpoint keeps those of its training.
INPUT_KEYS = {
    "min_pixels": None,
    "max_pixels": None,
    "video_fps": 2.0,
    "video_max_frames": 768,
    "max_seq_length": None,
    "overlong": None,
}


@dataclass
class DataArguments:
    dataset_path: list[str] = key(
        [],
        "Preference data: a hub id, a save_to_disk folder, or files of any kind in docs/data.md; several are mixed.",
    )
    dataset_weights: list[float] | None = key(
        None,
        "One number a source: 2 repeats a source twice an epoch, 0.5 takes half of it. Default: everything once.",
    )
    dataset_split: str = key("train", "Split of hub data sets and save_to_disk folders.")
    eval_dataset_path: list[str] = key([], "Held-out preferences, in any of the same formats.")
    eval_dataset_split: str = key("train", "Split of `eval_dataset_path`.")
    eval_fraction: float = key(
        0.0,
        "Without `eval_dataset_path`: the share of prompts held out for evaluation. Rows that share a prompt and its "
        "images fall on one side.",
    )
    split_seed: int = key(0, "Seed of the held-out split and of sampling rows.")
    max_train_samples: int | None = key(None, "Use at most so many training rows.")
    max_eval_samples: int | None = key(None, "Use at most so many evaluation rows.")
    image_root: str | None = key(None, "Folder of relative image paths. Default: that of the file that names them.")
    columns: Columns | str | None = field(
        default=None,
        metadata={
            "nargs": "+",
            "help": "Columns that have other names in the data, as NAME=COLUMN: `images=file_name prompt=query`; "
            "`ignore=COLUMN` reads nothing of one. In a file a mapping.",
        },
    )
    outputs: dict[str, str] | str | None = field(
        default=None,
        metadata={
            "nargs": "+",
            "help": "What the model answers, as NAME=KIND: preference, gaussian, `rating LOW-HIGH`, `ordinal LOW-HIGH`"
            ", correctness or progress; columns of these names hold values of answers. In a file a mapping. Default: "
            "one preference.",
        },
    )
    total: dict[str, float] | str | None = field(
        default=None,
        metadata={
            "nargs": "+",
            "help": "Weights of outputs in the one number of the model, as NAME=WEIGHT. Default: the first alone.",
        },
    )
    critique_weight: float = key(
        0.0,
        "Weight of the loss by which the model also learns to write the column `critique`: of one answer a text, of "
        "several a list with one for each. The score does without it.",
    )
    images: str | None = key(
        None,
        "`required`: a row without an image or video is wrong; `none`: a row with one is. Default: both are right.",
        choices=["required", "none"],
    )
    path_rewrites: list[str] = key([], "OLD=NEW prefixes to replace in media paths, tried in order.")
    min_pixels: int | None = key(None, "Smaller images are enlarged to this area. Default: the model's own.")
    max_pixels: int | None = key(None, "Larger images are shrunk to this area. Default: the model's own.")
    video_fps: float | None = key(
        None, "Frames read from each second of a video. Default: 2, or those of a checkpoint's training."
    )
    video_max_frames: int | None = key(
        None, "Most frames read from one video. Default: 768, or those of a checkpoint's training."
    )
    max_seq_length: int | None = key(
        None, "Longest conversation in tokens, images included. Default: the model's own."
    )
    overlong: str | None = key(
        None,
        "Rows over `max_seq_length`: `drop` them, `trim` the end of the response, or stop with an `error`. Images and "
        "prompts are never cut. Default: `drop`, or `trim` where a checkpoint was trained so.",
        choices=["drop", "trim", "error"],
    )
    bad_rows: str = key(
        "error",
        "Rows that cannot be read, or whose images or videos cannot: stop with an `error`, or `skip` and count them.",
        choices=["error", "skip"],
    )

    @property
    def column_names(self) -> Columns:
        """The mapping `columns`, of our names to those of the data."""
        return cast(Columns, self.columns or {})

    @property
    def named_outputs(self) -> Outputs:
        """The outputs of the model that is trained or judged."""
        return Outputs.parse(*(cast(Any, it) for it in (self.outputs, self.total)))

    @property
    def critiques(self) -> frozenset[str]:
        """The column of critiques, where they are read."""
        return frozenset({CRITIQUE} if self.critique_weight else ())

    def input_record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of `INPUT_KEYS`; lengths only where longer answers have a score, trimmed."""
        kept = [name for name in INPUT_KEYS if name not in ("max_seq_length", "overlong") or self.overlong == "trim"]
        return {name: INPUT_KEYS[name] if getattr(self, name) is None else getattr(self, name) for name in kept}

    def as_trained(self, trained: Mapping[str, Any]) -> Self:
        """Return the keys, with a checkpoint's record for those that are not set; log others than it has."""
        shown = copy(self)
        vars(shown).update({name: trained.get(name) for name in INPUT_KEYS if getattr(self, name) is None})
        cut = "trim" in (shown.overlong, trained.get("overlong"))
        for name, default in INPUT_KEYS.items():
            value, before = (default if it is None else it for it in (getattr(shown, name), trained.get(name)))
            if name in trained and value != before and (cut or name not in ("max_seq_length", "overlong")):
                logger.warning(
                    "%s is %s, and the model was trained with %s: its scores are not those of its training",
                    name, value, before,
                )  # fmt: skip
        return shown

    def __post_init__(self):
        self.outputs, self.total = (parse_names(key, getattr(self, key)) for key in ("outputs", "total"))
        names = self.named_outputs.named
        if both := sorted(names & (read_columns() - FIGURES | self.critiques)):
            raise ConfigError(f"an output is called {both[0]}, a column of docs/data.md: give it another name.")
        self.columns = parse_columns(self.columns, names | self.critiques)
        if not 0 <= self.critique_weight < math.inf:
            raise ConfigError(f"critique_weight is {self.critique_weight}: it must be at least 0.")
        # YAML users write one path as a plain string.
        for name in ("dataset_path", "eval_dataset_path", "path_rewrites"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        if self.dataset_weights is not None and len(self.dataset_weights) != len(self.dataset_path):
            raise ConfigError(
                f"dataset_weights has {len(self.dataset_weights)} numbers for {len(self.dataset_path)} data sets: "
                "give one number for each dataset_path."
            )
        if not 0.0 <= self.eval_fraction < 1.0:
            raise ConfigError(
                f"eval_fraction is {self.eval_fraction}: it is a share of the rows, at least 0 and below 1."
            )
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels}).")
        limits = ("max_train_samples", "max_eval_samples", "max_seq_length", "min_pixels", "video_max_frames")
        check_least(self, 1, *limits)
        if self.max_pixels is not None and self.max_pixels < LEAST_PIXELS:
            raise ConfigError(
                f"max_pixels is {self.max_pixels}: it is an area, and one image token shows {LEAST_PIXELS} pixels."
            )
        if self.video_fps is not None and not self.video_fps > 0:
            raise ConfigError(f"video_fps is {self.video_fps}: it must be above 0.")
        for rewrite in self.path_rewrites:
            if "=" not in rewrite:
                raise ConfigError(f"path_rewrites holds {rewrite!r}: write OLD=NEW.")
