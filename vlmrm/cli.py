"""The command line `vlmrm VERB`. Heavy imports happen inside the verbs, so that help is instant."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

import vlmrm
from vlmrm.commands import epilogue, give_examples
from vlmrm.commands.data import check_data, convert
from vlmrm.commands.evaluation import Words, calibrate, card, distil, evaluate, leaderboard, leakage, report, rulers
from vlmrm.commands.score import score
from vlmrm.commands.serve import app as serving
from vlmrm.config import answered
from vlmrm.errors import ConfigError, VlmrmError, first_line
from vlmrm.libraries import ROBOTS, install_command, needs
from vlmrm.logs import quiet_libraries, say
from vlmrm.plugins import without_plugins

SCORE = 'score --model outputs/best --image cat.jpg --prompt "What is this?" --response "A cat." --response "A dog."'
EXAMPLES = (
    "demo",
    "train training_configs/7b_config.yaml --learning_rate 5e-6",
    "eval training_configs/eval_config_example.yaml",
    SCORE,
)
EXAMPLES_OF_VERBS = (
    "score --model outputs/best --input my_pairs.jsonl --output scores",
    "init my_pairs.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --output my_config.yaml",
    "init my_pairs.csv --columns images=photo prompt=query",
    "init-tiny outputs/tiny --arch qwen3_vl",
    "convert my_columns.jsonl my_lists.jsonl --output all.jsonl --columns images=photo prompt=query",
    "report results/mine.csv --output results/report",
    "leaderboard results/all results/yesterday.csv --output outputs/leaderboard",
    "card outputs/mine/checkpoint-500 results/mine.csv --data me/my_pairs",
    "leakage --train my_pairs.jsonl --eval my_test.jsonl",
    "distil --from judge:Qwen3-VL-32B@http://localhost:8000/v1 --data my_answers.jsonl --output judged.jsonl",
    "calibrate outputs/mine/final --dataset_path my_pairs.jsonl",
    "rulers my_pairs.jsonl",
    "rulers --benchmark rewardbench",
    "merge outputs/lora/final outputs/merged",
    "import Skywork/Skywork-VL-Reward-7B --output models/skywork",
    "rewards record rational_rewards_t2i --checkout ../Flow-Factory",
    "import my_swift_adapter --base Qwen/Qwen2.5-VL-7B-Instruct --output models/mine",
    "export --model outputs/best --output outputs/exported",
    "serve --model outputs/best",
    "serve --config service.toml --port 9000",
    "serve api --config service.toml",
    "serve workers --config service.toml",
    "serve prepare --config service.toml",
)


app = App(
    name="vlmrm",
    help="Train vision-language reward models from preferences, measure them, and score with them; `--plugin FILE` "
    "beside any verb imports what you add.",
    help_epilogue=epilogue(EXAMPLES),
    version=vlmrm.__version__,
    default_parameter=Parameter(negative_iterable=()),
    suppress_keyboard_interrupt=False,  # `run` reports it
)

app.register_install_completion_command(help="Complete verbs and options in this shell: bash, zsh or fish.")
app.command(serving)
rewards = App(name="rewards", help="Rewards for reinforcement learning.")
app.command(rewards)

app.command(convert)
app.command(check_data, name="check-data", help_flags=[])
app.command(score)
app.command(report)
app.command(leaderboard)
app.command(card)
app.command(leakage)
app.command(distil)
app.command(rulers)
app.command(evaluate, name="eval", help_flags=[])
app.command(calibrate, help_flags=[])


def _refusing(message: str, summary: str) -> Callable[..., None]:
    """Return a verb that only says why it cannot be used."""

    def verb(*words: Words) -> None:
        raise ConfigError(message)

    verb.__doc__ = summary
    return verb


# Installed packages bring verbs, each a function or an App of cyclopts; a broken one leaves the others alone.
for entry in entry_points(group="vlmrm.commands"):
    try:
        app.command(entry.load(), name=entry.name)
    except Exception as error:
        problem = f"vlmrm {entry.name} cannot be used, because {entry.value} is broken: {first_line(error)}."
        app.command(_refusing(problem, f"Broken: {entry.value}."), name=entry.name, help_flags=[])
if "frames" not in app:
    problem = f"vlmrm frames needs {ROBOTS}: {install_command(f'{ROBOTS}[frames]')}."
    app.command(_refusing(problem, f"Rewards from frames: needs {ROBOTS}."), name="frames", help_flags=[])


@app.command(help_flags=[])
@needs("train", "training")
def train(*words: Words) -> None:
    """Train a reward model: CONFIG.yaml [--key value ...]; --help lists its keys."""
    if (keys := answered("train", "Train a reward model from preferences.", words)) is not None:
        from vlmrm.training import train

        train(keys)


@app.command
@needs("train", "writing a configuration")
def init(
    *data: str,
    model: str | None = None,
    output: Path = Path("config.yaml"),
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    outputs: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    image_root: str | None = None,
) -> None:
    """Write a commented configuration that starts on this machine: init DATA [--model ID].

    Args:
        data: Preferences: files, folders or hub ids.
        model: Checkpoint to start from. Default: one that this machine can train.
        output: The configuration; an existing file is never overwritten.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        outputs: What the model answers, as NAME=KIND ("clarity=rating 1-5"). Default: one preference, or of single
            answers their columns of numbers.
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
    """
    from vlmrm.commands.plan import init_command
    from vlmrm.data.arguments import DataArguments

    reading: dict[str, Any] = {"columns": columns, "outputs": outputs, "image_root": image_root}
    init_command(DataArguments([*data], bad_rows="skip", **reading), model, output)


@app.command(help_flags=[])
@needs("train", "planning a training")
def plan(*words: Words) -> None:
    """Plan a training (rows, steps, memory, time, disk) and say whether it would start: CONFIG.yaml [--key value]."""
    summary = "Plan a training with these keys and say whether it would start; --json prints one JSON object."
    if (keys := answered("plan", summary, words, "--json")) is not None:
        from vlmrm.commands.plan import plan_command

        raise SystemExit(plan_command(keys, "--json" in words))


@app.command(name="init-tiny")
@needs("local", "making a model")
def init_tiny(folder: Path, *, arch: str = "qwen2_5_vl", seed: int = 0, reward: bool = False) -> None:
    """Make a tiny model with random weights, tokenizer and processor included, for tests and trials.

    Args:
        folder: Folder of the model.
        arch: qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_5 or mimo_vl.
        seed: Seed of the weights.
        reward: Make it a reward model, with an untrained head.
    """
    from vlmrm.modeling import make_tiny, make_tiny_reward_model

    make = make_tiny_reward_model if reward else make_tiny
    say(f"wrote a tiny {arch} to {make(folder, arch=arch, seed=seed)}")


@app.command
@needs("local", "merging")
def merge(adapter: Path, output: Path, *, base_model: str | None = None) -> None:
    """Merge a LoRA checkpoint into a full reward model.

    Args:
        adapter: The adapter checkpoint.
        output: Folder of the merged model.
        base_model: Current path of the adapter's base model.
    """
    from vlmrm.modeling import merge

    merge(adapter, output, base_model)
    say(f"merged {adapter} into {output}")


@app.command(name="import")
@needs("local", "importing")
def import_(
    source: str,
    *,
    output: Path,
    layout: str | None = None,
    base: str | None = None,
    template: Path | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    revision: str | None = None,
    trust_remote_code: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Make a reward model that others have trained one of ours: to score with, and to train further.

    Args:
        source: Folder, weight file or hub id of the published model; docs/models.md lists the layouts.
        output: Folder of the imported model.
        layout: Layout of its head. Default: by its names.
        base: Model that an adapter was trained on, or whose configuration and processor a bare weight file needs.
        template: Text file of its authors' instruction, where the layout has one; of several, `{output}` in its name
            stands for that of the output.
        min_pixels: Least area of an image. Default: the authors'.
        max_pixels: Greatest area of an image. Default: the authors'.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Run the code of the model's own repository.
    """
    options = {name: value for name, value in locals().items() if name not in ("source", "output")}
    from vlmrm.modeling import import_reward

    made = import_reward(source, output, **options)
    say(f"imported {source} into {output}: {made.layout}, {', '.join(made.outputs.names)}")


@rewards.command
def record(name: str, *, checkout: Path, output: Path = Path()) -> None:
    """Write the request or instruction of a published judge as a file, in the words of its own program.

    Nothing of the checkout is run; the file is read as the reward reads it, and so is the reply that it asks for.

    Args:
        name: The judge or one of its programs; docs/rewards.md lists them.
        checkout: A clone of its repository, or the folder in which its package is installed.
        output: Folder of the file.
    """
    from vlmrm.rewards.originals import record

    original, paths = record(name, checkout, output)
    lines = [f"  {setting}: {path}" for setting, path in paths.items()]
    reward = [f"  reward_model: {original.reward}"] if original.reward else []
    say("\n".join([f"wrote what {original.project} says; name it in the configuration:", *reward, *lines]))


@app.command
@needs("local", "exporting")
def export(*, model: str, output: Path, base_model: str | None = None) -> None:
    """Write a reward model for vLLM and transformers, adapters merged; its README.md tells how to serve it.

    Args:
        model: A trained checkpoint with a linear head.
        output: Folder of the exported model.
        base_model: Current path of an adapter's base model.
    """
    from vlmrm.export import export

    say(f"exported {model} to {export(model, output, base_model_path=base_model)}")


@app.command
@needs("train", "the demo")
def demo(*, output: Path = Path("outputs/demo")) -> None:
    """Train on handwritten digits, sweep the checkpoints and score: the whole path in one or two minutes.

    Args:
        output: Folder for the data, the checkpoints and summary.json; replaces an earlier demo in it.
    """
    from vlmrm.commands.demo import run_demo

    run_demo(output)


give_examples(app, [*EXAMPLES, *EXAMPLES_OF_VERBS])


def main(*verb: str) -> None:
    """Run the command line, or one verb of it, as the whole of this process."""
    try:
        run(lambda: app([*verb, *without_plugins(sys.argv[1:])]))
    finally:  # a second Ctrl-C must not break into the end with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# cosmos-rl calls these two by the names of its own service.
serve_script, prepare_script = partial(main, "serve"), partial(main, "serve", "prepare")


def run(command: Callable[[], Any]) -> None:
    """Run a verb; print an error of the user as one sentence, and exit with its status."""
    quiet_libraries()
    try:
        command()
    except VlmrmError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
        raise SystemExit(0) from None
