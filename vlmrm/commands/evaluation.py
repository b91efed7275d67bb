"""`vlmrm eval`, `calibrate`, `report`, `leaderboard`, `card`, `leakage` and `rulers`.

Heavy imports happen inside the verbs, so that help is instant.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from vlmrm.config import answered, helped
from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm.libraries import needs
from vlmrm.logs import counted, say, start_log

# `train`, `eval` and `check-data` hand their words to TRL's parser, which knows HF's hundred keys.
Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@needs("train", "evaluating")
def evaluate(*words: Words) -> None:
    """Evaluate checkpoints of trainings, or any other scorer, on any number of data sets: CONFIG.yaml [--key ...]."""
    if (keys := answered("eval", "Evaluate checkpoints of trainings, or any other scorer.", words)) is None:
        return
    from vlmrm.evaluation.sweep import sweep

    result = sweep(keys)
    if result.sets:
        folder = result.csv.with_suffix("")
        models, sets = counted(len(result.rows), "checkpoint"), counted(len(result.sets), "data set")
        say(f"{models} on {sets} in {result.csv}, and of each in {folder}")
        say(f"rank them: vlmrm leaderboard {folder}; see one set: vlmrm report {next(iter(result.sets.values())).csv}")
    else:
        say(f"{counted(len(result.rows), 'row')} in {result.csv} and {result.csv.with_suffix('.json')}")
    if result.scores.is_file():
        say(f"see them: vlmrm report {result.scores}")
    if result.choice is not None:
        say(f"best: {result.choice['path']} with {result.choice['metric']} {result.choice['value']:.4f}")
    if result.choice is not None and result.scores.is_file():
        from vlmrm.evaluation.report import summary

        say(summary([result.scores]))
    if result.unread:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in result.unread.items())
        count = len(result.unread) + len(result.sets)
        raise DataError(f"{len(result.unread)} of {count} data sets could not be evaluated: {reasons}")
    evaluated = [row for row in result.rows if row["path"] in result.paths]
    failed = [row for row in evaluated if row["error"]]
    if failed:
        raise CheckpointError(
            f"{len(failed)} of {len(evaluated)} could not be evaluated: see the column error of {result.csv}, fix the "
            "cause, and run again, which repeats only those."
        )


@needs("train", "evaluating")
def calibrate(*words: Words) -> None:
    """Write into a checkpoint how its scores on reference data are distributed: CHECKPOINT --dataset_path FILE."""
    summary = "Write into a checkpoint how its scores on reference data are distributed, of each output too."
    if helped("calibrate", summary, words, "CHECKPOINT --dataset_path FILE ..."):
        return
    from vlmrm.evaluation.sweep import sweep
    from vlmrm.modeling.checkpoint import no_checkpoint
    from vlmrm.modeling.manifest import read_reward_file, scale_in

    if not words or words[0].startswith("-"):
        raise ConfigError("there is nothing to calibrate: name the folder of a checkpoint first, and --dataset_path.")
    if not Path(words[0]).is_dir() or read_reward_file(words[0]) is None:
        raise no_checkpoint(words[0], "there is no reward_model.json in it")
    with TemporaryDirectory(prefix="vlmrm-scale-") as folder:
        fixed = ["--interventions", "none", "--output_file", f"{folder}/scale.csv"]
        [row] = sweep(["--model_dirs", *words, *fixed]).rows
    if row["error"]:
        raise CheckpointError(f"{row['path']} cannot be calibrated: {row['error']}")
    scale = scale_in(words[0])
    for name, of in {"score": scale, **scale.get("reward_scales", {})}.items():
        low, middle, high = (of["reward_quantiles"][place] for place in (5, 50, 95))
        fits = "" if of.get("reward_temperature") else "; no temperature, so no probability"
        say(f"{name}: {middle:.4g} in the middle, 90 % from {low:.4g} to {high:.4g}, of {of['reward_count']:,}{fits}")


@needs("report", "the report")
def report(*results: Path, output: Path = Path("outputs/report"), title: str = "Reward model report") -> None:
    """Make a page that shows what the evaluated checkpoints learned, or compares several evaluations.

    Args:
        results: The output_file of an evaluation, or its .scores.parquet.
        output: Folder for report.html and plots/.
        title: Heading of the page.
    """
    from vlmrm.evaluation.report import build_report

    say(f"the report is {build_report(results, output, title)}")


@needs("train", "the leaderboard")
def leaderboard(
    *results: Path,
    output: Path = Path("outputs/leaderboard"),
    title: str = "Leaderboard",
    best: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show the models of any number of evaluations in one table, with the ranks that the data leave open.

    Args:
        results: The output_file of an evaluation, or the folder of a suite; several are merged.
        output: Folder for leaderboard.html and leaderboard.csv.
        title: Heading of the page.
        best: Take of each evaluation only the checkpoint that it chose as the best.
    """
    from vlmrm.evaluation.leaderboard import build_leaderboard

    page = build_leaderboard(results, output, title=title, best_only=best)
    say(f"the leaderboard is {page}")


@needs("train", "the model card")
def card(model: Path, results: Path, *, data: str) -> None:
    """Write a checkpoint's README.md: a scoring snippet, results with intervals, limits, training.

    Args:
        model: The checkpoint; an earlier README.md in it is replaced.
        results: The output_file of an evaluation of it, or its .scores.parquet.
        data: Name of the evaluation data on the card, such as its hub id.
    """
    from vlmrm.evaluation.report import write_card

    say(f"the model card is {write_card(model, results, data=data)}")


@needs("train", "distilling")
def distil(
    *,
    scorers: Annotated[list[str], Parameter(name="--from", consume_multiple=True)],
    data: Annotated[list[str], Parameter(consume_multiple=True)],
    output: Path,
    split: str = "train",
    image_root: str | None = None,
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    limit: int | None = None,
    batch_rows: int = 8,
) -> None:
    """Have judges, rewards or checkpoints judge answers, and write what they say as data to train on.

    Args:
        scorers: Who judges: what the key scorer of vlmrm eval takes; several are raters of the same answers.
        data: Files, folders, patterns or hub ids of answers; judgements in them are left out.
        output: A .jsonl file, written anew each time; the answers so far stay beside it, and are not asked again.
        split: Split of hub data sets and save_to_disk folders.
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        limit: Take only the first rows, to see the time and the tokens that they cost.
        batch_rows: Rows that a scorer is asked about at a time.
    """
    from vlmrm.data.arguments import DataArguments
    from vlmrm.data.columns import parse_columns
    from vlmrm.evaluation.distil import distil

    start_log("distil")
    reading = DataArguments(image_root=image_root, columns=parse_columns(columns), bad_rows="skip")
    made = distil(scorers, data, output, reading=reading, split=split, limit=limit, batch_rows=batch_rows)
    doubt = "" if made.disagreement is None else f"; {made.disagreement:.1%} of verdicts differ from the most common"
    say(f"wrote {counted(made.rows, 'row')} to {output}{doubt}")
    if made.failures:
        reason, count = made.failures.most_common(1)[0]
        total = counted(made.failures.total(), "answer")
        raise DataError(f"{total} missing, {count} as {reason}; run again to ask for these alone.")


@needs("train", "reading data sets")
def leakage(
    *,
    train: Annotated[list[str], Parameter(consume_multiple=True)],
    evaluation: Annotated[list[str], Parameter(name="--eval", consume_multiple=True)],
    train_split: str = "train",
    eval_split: str = "train",
    image_root: str | None = None,
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Find evaluation data that was trained on: exit status 3 if any prompt or image was, else 0.

    Args:
        train: Training data: files, folders or hub ids of preferences.
        evaluation: Evaluation data.
        train_split: Split of the training data in hub data sets and save_to_disk folders.
        eval_split: Split of the evaluation data there.
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        json_output: Print one JSON object.
    """
    from vlmrm.data.arguments import DataArguments
    from vlmrm.data.columns import parse_columns
    from vlmrm.evaluation.leakage import format_leakage, leakage, open_rows

    reading = DataArguments(image_root=image_root, columns=parse_columns(columns))
    result = leakage(open_rows(train, reading, train_split), open_rows(evaluation, reading, eval_split))
    say(json.dumps(result.block(), indent=2) if json_output else format_leakage(result))
    raise SystemExit(DataError.exit_code if result.leaked or result.unreadable else 0)


@needs("train", "reading data sets")
def rulers(
    *data: str,
    benchmark: str | None = None,
    split: str = "train",
    image_root: str | None = None,
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    limit: int | None = None,
) -> None:
    """Audit a set of preferences: what length, position, images, and models blind to images or question score.

    Args:
        data: Preferences: files, folders or hub ids; with --benchmark its local copy.
        benchmark: A public benchmark by name, also scored by its authors' rule.
        split: Split of hub data sets and save_to_disk folders.
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        limit: Take only so many rows, chosen at random.
    """
    from vlmrm.data.arguments import DataArguments
    from vlmrm.data.columns import parse_columns
    from vlmrm.data.comparisons import iterate_comparisons, load_comparisons
    from vlmrm.evaluation.public import benchmark as named
    from vlmrm.evaluation.public import load_benchmark
    from vlmrm.evaluation.rulers import format_rulers, read_rulers

    reading = DataArguments(
        image_root=image_root, columns=parse_columns(columns), max_eval_samples=limit, bad_rows="skip"
    )
    if benchmark is None:
        if not data:
            raise ConfigError("there is nothing to audit: name preferences, or a benchmark with --benchmark.")
        public, rows = None, load_comparisons([*data], arguments=reading, split=split, limit=limit)
    else:
        if len(data) > 1 or columns or split != "train":
            raise ConfigError("--benchmark says what is read: give at most its local copy, no columns and no split.")
        public, rows = named(benchmark), load_benchmark(benchmark, next(iter(data), None), reading)
    readings = read_rulers(iterate_comparisons(rows), public)
    say(format_rulers(readings, public))
