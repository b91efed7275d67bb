"""`vlmrm VERB`: one thin function a verb. Heavy imports happen inside the verbs, so that help is instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

import vlmrm
from vlmrm.errors import CheckpointError, VlmrmError
from vlmrm.logs import quiet_libraries

EPILOGUE = """
Examples:

    vlmrm demo
    vlmrm train training_configs/7b_config.yaml --learning_rate 5e-6
    vlmrm eval training_configs/eval_config_example.yaml
    vlmrm score --model outputs/best --image cat.jpg --prompt "What is this?" --response "A cat." --response "A dog."
"""

app = App(
    name="vlmrm",
    help="Train vision-language reward models from preferences, measure them, and score with them.",
    help_epilogue=EPILOGUE,
    version=vlmrm.__version__,
    default_parameter=Parameter(negative_iterable=()),
)

# `train` and `eval` hand their words to TRL's parser, which knows HF's hundred keys.
Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command(help_flags=[])
def train(*words: Words) -> None:
    """Train a reward model: CONFIG.yaml [--key value ...]; --help lists every key."""
    from vlmrm.training.main import train

    train(words)


@app.command(name="eval", help_flags=[])
def evaluate(*words: Words) -> None:
    """Evaluate every checkpoint of one or more trainings: CONFIG.yaml [--key value ...]."""
    from vlmrm.evaluation.sweep import sweep

    result = sweep(words)
    _print(f"{len(result.rows)} checkpoints in {result.csv} and {result.csv.with_suffix('.json')}")
    _print(f"see them: vlmrm report {result.scores}")
    if result.best is not None:
        _print(f"best: {result.best['path']} with accuracy {result.best['preference_accuracy']:.4f}")
    failed = [row for row in result.rows if row["error"]]
    if failed:
        raise CheckpointError(
            f"{len(failed)} of {len(result.rows)} checkpoints could not be evaluated: see the column error of "
            f"{result.csv}, mend them and run again for those alone."
        )


@app.command
def score(
    *,
    model: str,
    prompt: str,
    response: list[str] | None = None,
    image: list[Path] | None = None,
    response_image: list[Path] | None = None,
    device: str | None = None,
    dtype: str = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Score answers to a prompt: higher is better, and only differences mean something.

    Parameters
    ----------
    model:
        A trained checkpoint.
    prompt:
        What was asked.
    response:
        An answer; repeat it for each.
    image:
        An image that the prompt is about; repeat it for several.
    response_image:
        An image that answers the prompt (text-to-image); repeat it for each.
    device:
        Default: the GPU where there is one.
    dtype:
        auto, bfloat16, float16 or float32.
    json_output:
        Print one JSON object.
    """
    from vlmrm.scoring.command import score_command

    answers = score_command(model, prompt, response or [], image or [], response_image or [], device, dtype)
    if json_output:
        _print(json.dumps({"model": model, "prompt": prompt, "answers": answers}, indent=2))
        return
    best = max(answers, key=lambda answer: answer["score"])
    for answer in answers:
        _print(f"{answer['score']:+9.4f}  {answer['answer']}{'  <- best' if answer is best else ''}")


@app.command
def report(*results: Path, output: Path = Path("outputs/report"), title: str = "Reward model report") -> None:
    """Make one page that shows what the evaluated checkpoints learned; several results are compared.

    Parameters
    ----------
    results:
        The output_file of an evaluation, or its .scores.parquet.
    output:
        Folder for report.html and plots/.
    title:
        Heading of the page.
    """
    from vlmrm.evaluation.report import build_report

    _print(f"the report is {build_report(results, output, title)}")


@app.command
def card(model: Path, results: Path, *, data: str) -> None:
    """Write a checkpoint's README.md: a scoring snippet, results with intervals, limits, training.

    Parameters
    ----------
    model:
        The checkpoint; an earlier README.md in it is replaced.
    results:
        The output_file of an evaluation of it, or its .scores.parquet.
    data:
        What the card calls the evaluation data; a hub id where there is one.
    """
    from vlmrm.evaluation.card import write_card

    _print(f"the model card is {write_card(model, results, data=data)}")


@app.command(name="check-data", help_flags=[])
def check_data(*words: Words) -> None:
    """Say what is in preference data, how it will be read, what is wrong with which row: FILE ... [--key value]."""
    from vlmrm.data.command import check_data_command

    raise SystemExit(check_data_command(words))


@app.command(name="init-tiny")
def init_tiny(folder: Path, *, arch: str = "qwen2_5_vl", seed: int = 0) -> None:
    """Make a tiny model with random weights, tokenizer and processor included, for tests and trials.

    Parameters
    ----------
    folder:
        Where to write it.
    arch:
        qwen2_5_vl, qwen2_vl, qwen3_vl or mimo_vl.
    seed:
        Equal seeds make equal weights.
    """
    from vlmrm.modeling import make_tiny

    _print(f"wrote a tiny {arch} to {make_tiny(folder, arch=arch, seed=seed)}")


@app.command
def merge(adapter: Path, output: Path) -> None:
    """Merge a LoRA checkpoint into a full reward model.

    Parameters
    ----------
    adapter:
        The adapter checkpoint.
    output:
        Folder of the merged model.
    """
    from vlmrm.modeling import merge

    merge(adapter, output)
    _print(f"merged {adapter} into {output}")


@app.command
def demo(*, output: Path = Path("outputs/demo")) -> None:
    """Train on handwritten digits, sweep the checkpoints and score: the whole path in two minutes.

    Parameters
    ----------
    output:
        Folder for the data, the checkpoints and summary.json; it must not hold an earlier demo's checkpoints.
    """
    from vlmrm.demo import run_demo

    run_demo(output)


def main() -> None:
    """Entry point of `vlmrm`: what a user can mend prints as one sentence, with the error's own exit status."""
    run(app)


def train_script() -> None:
    """Entry point of train_rm.py."""
    run(lambda: train(*sys.argv[1:]))


def eval_script() -> None:
    """Entry point of eval_rm.py."""
    run(lambda: evaluate(*sys.argv[1:]))


def run(command: Callable[[], Any]) -> None:
    quiet_libraries()
    try:
        command()
    except VlmrmError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
        raise SystemExit(0) from None


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


__all__: Sequence[str] = ["app", "main", "train_script", "eval_script"]
