"""The configuration keys of a checkpoint sweep, beside those of its data in `DataArguments`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError
from vlmrm.evaluation.choosing import BENCHMARK, Criterion, split_metric
from vlmrm.libraries import parse_dtype
from vlmrm.measures.interventions import GROUPS, INTERVENTIONS, named
from vlmrm.measures.metrics import METRICS
from vlmrm.modeling.arguments import ComputeArguments
from vlmrm.settings import check_least, key

# Keys of `DataArguments` that evaluation does not use, and what to do instead.
NOT_EVALUATED = {
    "eval_dataset_path": "name the rows to score as dataset_path",
    "eval_dataset_split": "give the split of dataset_path as dataset_split",
    "max_train_samples": "give max_eval_samples",
    "critique_weight": "remove it, critiques are trained on",
}
# Keys that apply to data sets, not to a benchmark.
NOT_OF_A_BENCHMARK = ("dataset_split", "dataset_weights", "eval_fraction", "columns", "images")


def check_data_keys(data_args: DataArguments) -> None:
    """Refuse keys of the data that no evaluation uses."""
    unset = DataArguments()
    for name, instead in NOT_EVALUATED.items():
        if getattr(data_args, name) != getattr(unset, name):
            raise ConfigError(f"{name} is a key of training, which evaluation does not use: {instead}.")


def check_set_keys(data_args: DataArguments, train_data: Sequence[str], *, is_benchmark: bool) -> None:
    """Refuse keys of one data set that do not go together."""
    unset = DataArguments()
    if is_benchmark:
        for name in NOT_OF_A_BENCHMARK:
            if getattr(data_args, name) != getattr(unset, name):
                raise ConfigError(f"{name} does not go with benchmark, which says what is scored: remove it.")
        if len(data_args.dataset_path) > 1:
            raise ConfigError(f"dataset_path names {len(data_args.dataset_path)} copies of one benchmark: give one.")
    if data_args.eval_fraction:
        if data_args.dataset_weights is not None:
            raise ConfigError(
                "dataset_weights are of the rows that are trained on, not of those that eval_fraction holds out: "
                "remove it."
            )
        if both := sorted({*train_data} & {*data_args.dataset_path}):
            raise ConfigError(
                f"train_data names {both[0]} as a whole, with the rows that eval_fraction holds out of it: remove one."
            )


@dataclass
class EvaluationArguments(ComputeArguments):
    model_dirs: list[str] = key([], "Training output folders, or checkpoints themselves.")
    scorer: list[str] = key(
        [],
        "Any other scorers: a checkpoint's folder or hub id, `hf:ID`, `reward:NAME`, "
        "`judge:MODEL@http://host:port/v1`, `http://host:port` or `python:module.function`, each with its options "
        "as `?key=value&key=value`.",
    )
    scorer_drops_media: bool = key(
        False, "Show a scorer that cannot see images or videos the texts alone, instead of refusing it."
    )
    checkpoint_pattern: str = key("checkpoint-*", "Which folders inside each of `model_dirs` are checkpoints.")
    base_model_path: str | None = key(
        None, "Base of adapter checkpoints, and processor of checkpoints saved without one."
    )
    eval_batch_size: int = key(8, "Comparisons in a batch.")
    output_file: str = key("evaluation_results.csv", "The results table; the details go beside it as .json.")
    dtype: str = key(
        "auto", "Type of the weights: bfloat16, float16 or float32 (bf16, fp16, fp32); `auto` keeps the checkpoint's."
    )
    interventions: list[str] = key(
        ["standard"],
        "What to score beside the comparisons, to see what the preference rests on: names, "
        f"{', '.join(GROUPS[:-1])} or {GROUPS[-1]}.",
    )
    intervention_sample: int = key(
        1200,
        "The budget of each scorer: of about 300 comparisons, drawn as whole clusters, twice as many are scored under "
        "each intervention until every question is decided or so many are; of a smaller data set all.",
    )
    benchmark: list[str] = key(
        [],
        "Public benchmarks by name, scored by their authors' rules: vl-rewardbench, hpdv3, ...; "
        "`dataset_path` may name a local copy, of several a folder with a copy of each by its name.",
    )
    data: list[str] = key(
        [],
        "Several data sets, as PATH or NAME=PATH, each with results of its own; those of `dataset_path` "
        "are mixed into one.",
    )
    suite: str | None = key(
        None,
        "A YAML file of data sets by name, each with its keys, or a list of public benchmarks by name: "
        "image-understanding, image-generation, image-editing, video, robots, text.",
    )
    group_by: list[str] = key([], "Columns of the data whose values get figures of their own.")
    cluster_by: str | None = key(
        None,
        "The column whose values are independent of each other, such as document or user: the unit of intervals, "
        "tests and samples. By default all questions about one image are one; `prompt` takes each by itself.",
    )
    train_data: list[str] = key(
        [],
        "What the models were trained on, in any of the formats of `dataset_path`: the results then say "
        "which evaluation rows are in it, and how good the models are on the others.",
    )
    metric_for_best: str = key(
        "preference_accuracy",
        "The figure that chooses the best checkpoint: one of `statistics`, such as `loss`, "
        "`image_reliance` or `groupwise_accuracy`; `accuracy/CATEGORY`; or `benchmark/NAME`. Of several data "
        "sets it is the mean, or with SET:FIGURE the figure of one.",
    )
    fail_under: float | None = key(None, "Exit with status 6 when the best checkpoint's `metric_for_best` is below.")
    save_normalization: bool = key(
        True,
        "Save the scale of the scores with the best checkpoint, in its `reward_model.json`; nothing "
        "else of it changes.",
    )
    dataloader_num_workers: int | None = key(None, "Processes that open images. Default: up to four beside a GPU.")
    trust_remote_code: bool = key(False, "Run code that comes with the checkpoint.")

    def __post_init__(self):
        super().__post_init__()
        self.dtype = parse_dtype(self.dtype, auto=True)
        for name in ("model_dirs", "scorer", "benchmark", "data", "interventions", "group_by", "train_data"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        self.interventions = named(self.interventions)
        self._check_choice()
        if not self.model_dirs and not self.scorer:
            raise ConfigError(
                "model_dirs is missing: name at least one training output folder or checkpoint, or another scorer."
            )
        check_least(self, 1, "intervention_sample", "eval_batch_size")
        if not self.output_file.endswith(".csv"):
            raise ConfigError(f"output_file is {self.output_file}: it must end in .csv (the .json goes beside it).")

    def _check_choice(self) -> None:
        """Check the keys by which the best checkpoint is chosen, before anything is scored."""
        figure = split_metric(self.metric_for_best)[1]
        criterion = Criterion(figure)
        if self.fail_under is not None:
            if not criterion.higher_is_better:
                raise ConfigError(
                    f"fail_under needs a metric_for_best of which more is better, and of {criterion.metric} less is: "
                    "choose another."
                )
            if "accuracy" in criterion.metric and not 0 <= self.fail_under <= 1:
                raise ConfigError(f"fail_under is {self.fail_under}: it is an accuracy, from 0 to 1.")
        metric = METRICS.get(figure)
        needed = "" if metric is None else (metric.needs or "").removesuffix("_chosen")
        if needed in INTERVENTIONS and needed not in self.interventions:
            raise ConfigError(f"metric_for_best is {figure}, which needs {needed}: add it to interventions.")
        if figure.startswith(BENCHMARK) and not self.benchmark and self.suite is None:
            raise ConfigError(f"metric_for_best is {figure}, which needs a benchmark: name one.")
