"""Mistakes: each stops before the first step with one sentence, and nothing that was there is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.runs import colour_pairs, short_training, words, write_rows
from vlmrm import cli
from vlmrm.training.trainer import ComparisonTrainer

EVAL = {"eval_strategy": "steps", "eval_steps": 2}
AUTO = {"max_steps": 4, "resume_from_checkpoint": "auto"}
HALF = {"eval_fraction": 0.5, **EVAL}

Spoil = Callable[[Path], None]  # changes the folder of a run: data/pairs.jsonl, model, and out where it is resumed


@dataclass(frozen=True)
class Mistake:
    """What the user did, and a part of the sentence that answers it.

    In values, DATA stands for the data file, HERE for the folder of the run.
    """

    name: str
    sentence: str
    keys: dict[str, Any] = field(default_factory=dict)
    spoil: Spoil = lambda folder: None
    config: str | None = None  # the text of a configuration file
    trained: bool = False  # `out` holds two steps of training
    environment: dict[str, str] = field(default_factory=dict)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data/pairs.jsonl").read_text().splitlines()]


def every_row(**columns: Any) -> Spoil:
    return lambda folder: void(write_rows(folder / "data/pairs.jsonl", [row | columns for row in rows_of(folder)]))


def third_row(**columns: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        rows = rows_of(folder)
        rows[2] |= columns
        write_rows(folder / "data/pairs.jsonl", rows)

    return spoil


def third_image(make: Callable[[Path], Any]) -> Spoil:
    return lambda folder: void(make(folder / "data" / rows_of(folder)[2]["images"][0]))


def write(name: str, text: str = "") -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return spoil


def without_images(folder: Path) -> None:
    for path in (folder / "data").glob("*.png"):
        path.unlink()


def model_config(**keys: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return spoil


def without(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return spoil


def truncated(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])

    return spoil


def held_out(**columns: Any) -> Spoil:
    return lambda folder: void(colour_pairs(folder / "eval", 3, **columns))


def half(image: Path) -> None:
    Image.effect_noise((200, 200), 50).save(image)
    os.truncate(image, image.stat().st_size // 2)


def void(value: Any) -> None:
    """Turn an expression into a statement."""


MISTAKES = [
    # Keys ------------------------------------------------------------------------------------------------------------
    Mistake("mistyped key", "did you mean --learning_rate", {"learning_rat": 1e-5}),
    Mistake("another framework's key", "unknown argument --dataset_name: did you mean --dataset_path?",
            {"dataset_name": "m"}),
    Mistake("key twice in a file", "'seed' is on line 1 and on line 2", config="seed: 1\nseed: 2"),
    Mistake("tab in a file", "is not valid YAML", config="seed: 1\n\tuse_peft: true"),
    Mistake("list for a file", "must hold `key: value` lines", config="- seed"),
    Mistake("empty value in a file", "learning_rate is empty", config="learning_rate:"),
    Mistake("absent file", "there is no configuration file", {"config": "absent.yaml"}),
    Mistake("text for a number", "learning_rate", {"learning_rate": "fast"}),
    Mistake("negative rate", "learning_rate is -0.1: it must be at least 0", config="learning_rate: -0.1"),
    Mistake("no rows in a batch", "per_device_train_batch_size is 0", {"per_device_train_batch_size": 0}),
    Mistake("no steps", "no step at all", {"max_steps": 0}),
    Mistake("negative probe", "probe_samples is -1", config="probe_samples: -1"),
    Mistake("saving never", "save_steps is 0", {"save_steps": 0}),
    Mistake("mistyped schedule", "lr_scheduler_type", {"lr_scheduler_type": "cosin"}),
    Mistake("mistyped optimizer", "optim", {"optim": "adam"}),
    Mistake("optimizer not installed", "optim is adamw_8bit: ", {"optim": "adamw_8bit"}),
    Mistake("both half precisions", "fp16", {"fp16": True, "bf16": True}),
    Mistake("float16 on a CPU", "fp16 needs a GPU", {"fp16": True}),
    Mistake("mistyped dtype", "dtype is 'float8'", {"dtype": "float8"}),
    Mistake("4 bits of nothing", "load_in_4bit needs bitsandbytes", {"use_peft": True, "load_in_4bit": True}),
    Mistake("4 bits without adapters", "set use_peft: true", {"load_in_4bit": True}),
    Mistake("unknown layer for LoRA", "names w_proj", {"use_peft": True, "lora_target_modules": "w_proj"}),
    Mistake("LoRA keys without LoRA", "lora_r does nothing without use_peft", {"lora_r": 64}),
    Mistake("evaluation data without evaluation", "without eval_strategy", {"eval_dataset_path": "DATA"}),
    Mistake("a best metric that loads nothing", "without load_best_model_at_end",
            {"metric_for_best_model": "accuracy", **HALF}),
    Mistake("mistyped metric", "did you mean accuracy",
            {"metric_for_best_model": "acuracy", "load_best_model_at_end": True, "save_steps": 2, **HALF}),
    Mistake("best model without evaluation", "load_best_model_at_end", {"load_best_model_at_end": True}),
    Mistake("saving out of step with evaluation", "multiple",
            {"load_best_model_at_end": True, "save_steps": 3, **HALF}),
    Mistake("evaluation without data", "give eval_dataset_path or eval_fraction", EVAL),
    Mistake("two kinds of evaluation data", "remove one of them", {"eval_dataset_path": "DATA", **HALF}),
    Mistake("TRL's length", "write max_seq_length", {"max_length": 100}),
    Mistake("a way to compile", "write torch_compile: true", {"torch_compile_mode": "max-autotune"}),
    Mistake("label smoothing", "label_smoothing_factor changes nothing", {"label_smoothing_factor": 0.1}),
    Mistake("revision of a folder", "model_revision is for the hub", {"model_revision": "v2"}),
    Mistake("mistyped tracker", "report_to names wanbd", {"report_to": "wanbd"}),
    Mistake("tracker without a login", "wandb is not logged in: run `wandb login`", {"report_to": "wandb"},
            environment={"HOME": "/nowhere", "WANDB_API_KEY": "", "WANDB_MODE": "online"}),
    Mistake("pushing to the hub", "vlmrm export", {"push_to_hub": True}),
    Mistake("absent DeepSpeed file", "absent.json", {"deepspeed": "absent.json"}),
    Mistake("share above 1", "eval_fraction is 5.0", {"eval_fraction": 5, **EVAL}),
    Mistake("side for an area", "max_pixels is 448: it is an area", {"max_pixels": 448}),
    Mistake("limits the wrong way round", "is above max_pixels", {"min_pixels": 10**6, "max_pixels": 10**5}),
    # Launchers -------------------------------------------------------------------------------------------------------
    Mistake("a number in words", "WORLD_SIZE is 'two'", environment={"WORLD_SIZE": "two"}),
    Mistake("half a launcher", "without RANK and LOCAL_RANK and MASTER_ADDR", environment={"WORLD_SIZE": "2"}),
    Mistake("no place to meet", "is 2 in the environment without MASTER_ADDR",
            environment={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}),
    # Data ------------------------------------------------------------------------------------------------------------
    Mistake("mistyped data path", "did you mean", {"dataset_path": "HERE/data/pair.jsonl"}),
    Mistake("empty folder", "holds no", {"dataset_path": "HERE/empty"}, lambda folder: (folder / "empty").mkdir()),
    Mistake("empty file", "no rows", spoil=write("data/pairs.jsonl")),
    Mistake("picture for data", "of no kind that can be read", {"dataset_path": "HERE/data/0_red.png"}),
    Mistake("broken line", "pairs.jsonl", spoil=write("data/pairs.jsonl", '{"prompt": "?", "chosen"')),
    Mistake("unknown columns", "good", spoil=write("data/pairs.jsonl", '{"question": "?", "good": "a", "bad": "b"}')),
    Mistake("split of a file", "dataset_split does nothing for a file", {"dataset_split": "validation"}),
    Mistake("weights for other sources", "2 numbers for 1 data sets", {"dataset_weights": [1, 2]}),
    Mistake("absent evaluation data", "nope.jsonl does not exist", {"eval_dataset_path": "nope.jsonl", **EVAL}),
    Mistake("share that holds nothing out", "leaves no rows for evaluation", {"eval_fraction": 0.001, **EVAL}),
    Mistake("evaluation of ties", "has a preference",
            {"eval_dataset_path": "HERE/eval/pairs.jsonl", **EVAL}, held_out(tie=True)),
    Mistake("evaluation too long", "over max_seq_length",
            {"eval_dataset_path": "HERE/eval/pairs.jsonl", "max_seq_length": 200, **EVAL},
            held_out(chosen="long " * 200)),
    Mistake("everything too long", "none of the 4 rows of dataset_path can be used", {"max_seq_length": 20}),
    Mistake("half too long", "2 of the 4 rows of dataset_path would be left out (2 over max_seq_length",
            {"max_seq_length": 47}),
    Mistake("more tokens than positions", "positions: lower it", {"max_seq_length": 10**7}),
    Mistake("every image absent", "none of the 4 rows", {"bad_rows": "skip"}, without_images),
    Mistake("one image absent", "1 of the 4 rows", {"bad_rows": "skip"}, third_image(Path.unlink)),
    Mistake("rows that weigh nothing", "weighs anything", spoil=every_row(weight=0.0)),
    Mistake("negative weight", "row pair-2", spoil=third_row(weight=-1.0)),
    Mistake("equal answers", "the answers are the same", spoil=third_row(chosen="blue", rejected="blue")),
    Mistake("empty answer", "answer 2 is empty", spoil=third_row(rejected=" ")),
    Mistake("a placeholder too many", "more images than the row has", spoil=third_row(prompt="<image> and <image>")),
    Mistake("absent image", "2_blue.png does not exist", spoil=third_image(Path.unlink)),
    Mistake("image outside image_root", "outside image_root", {"image_root": "HERE/data"},
            third_row(images=["../model/config.json"])),
    Mistake("image of half its bytes", "2_blue.png is broken", spoil=third_image(half)),
    Mistake("image of no bytes", "has zero bytes", spoil=third_image(lambda path: path.write_bytes(b""))),
    Mistake("image too narrow", "1x201", spoil=third_image(lambda path: Image.new("RGB", (1, 201)).save(path))),
    Mistake("absent image_root", "nowhere", {"image_root": "nowhere"}),
    Mistake("batch larger than the data", "dataloader_drop_last leaves out all 4 rows",
            {"dataloader_drop_last": True, "per_device_train_batch_size": 16}),
    Mistake("irrelevant queries of one question", "no two of 4 rows have prompts", {"use_irrelevant_queries": True},
            every_row(images=None, prompt="What?")),
    Mistake("irrelevant queries of one image", "no two of 4 rows have prompts", {"use_irrelevant_queries": True},
            lambda folder: every_row(images=rows_of(folder)[0]["images"])(folder)),
    Mistake("margins of votes", "row pair-2: `margin` is 57", spoil=third_row(margin=57)),
    # Model -----------------------------------------------------------------------------------------------------------
    Mistake("mistyped model", "did you mean HERE/model", {"model_name_or_path": "HERE/modle"}),
    Mistake("hub model without a network", "check the path and the network", {"model_name_or_path": "Qwen/Qwen9"}),
    Mistake("data for a model", "is a file: give the folder of a checkpoint", {"model_name_or_path": "DATA"}),
    Mistake("model of another kind", "HERE/model", spoil=model_config(model_type="nothing")),
    Mistake("weights cut off", "HERE/model cannot be read", spoil=truncated("model/model.safetensors")),
    Mistake("no weights", "HERE/model", spoil=without("model/model.safetensors")),
    Mistake("no processor", "HERE/model has no processor",
            spoil=without("model/processor_config.json", "model/preprocessor_config.json")),
    Mistake("folder of data for a model", "HERE/data is no checkpoint that transformers can open: it has no",
            {"model_name_or_path": "HERE/data"}),
    Mistake("another head", "set head: linear", {"model_name_or_path": "HERE/out/final", "output_dir": "HERE/next",
                                                 "head": "mlp"}, trained=True),
    # Output and resuming ---------------------------------------------------------------------------------------------
    Mistake("file for a folder", "is a file where a folder is needed", {"output_dir": "DATA"}),
    Mistake("folder of the data", "was not made by a training", {"output_dir": "HERE/data"}),
    Mistake("folder of notes", "holds notes.txt", spoil=write("out/notes.txt", "mine")),
    Mistake("folder of a training", "--resume_from_checkpoint auto", trained=True),
    Mistake("absent checkpoint", "no checkpoint folder nowhere", {"resume_from_checkpoint": "nowhere"}),
    Mistake("resuming a final model", "no optimizer state",
            {"max_steps": 4, "resume_from_checkpoint": "HERE/out/final"}, trained=True),
    Mistake("resuming a broken checkpoint", "no longer verifies", AUTO,
            truncated("out/checkpoint-2/model.safetensors"), trained=True),
    Mistake("resuming a checkpoint of the future", "COMPLETE.json cannot be read", AUTO,
            write("out/checkpoint-2/COMPLETE.json", '{"schema": 9}'), trained=True),
    Mistake("resuming another model", "model_name_or_path is not the one", AUTO, model_config(extra=1), trained=True),
    Mistake("resuming on other data", "dataset_path is not the one", AUTO, every_row(margin=1.0), trained=True),
    Mistake("resuming another head", "head was linear", {"head": "mlp", **AUTO}, trained=True),
    Mistake("resuming with accumulation", "rows_per_step", {"gradient_accumulation_steps": 2, **AUTO}, trained=True),
    Mistake("resuming another decay", "weight_decay was", {"weight_decay": 0.5, **AUTO}, trained=True),
    Mistake("resuming what is frozen now", "freeze_llm was", {"freeze_llm": True, **AUTO}, trained=True),
    Mistake("resuming another schedule", "lr_scheduler_type was linear",
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_dataset_path": "DATA", **EVAL, **AUTO}, trained=True),
    Mistake("resuming another batch", "rows_per_step", {"per_device_train_batch_size": 4, **AUTO}, trained=True),
    Mistake("resuming another optimizer", "optim was", {"optim": "sgd", **AUTO}, trained=True),
    Mistake("resuming with LoRA", "use_peft was False", {"use_peft": True, **AUTO}, trained=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_checkpoint) -> Path:
    """Return the folder of a run with its data and two steps in `out`."""
    from vlmrm.training import train

    folder = tmp_path_factory.mktemp("trained")
    data = colour_pairs(folder / "data", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(short_training(tiny_checkpoint, data, folder / "out", max_steps=2, save_steps=2))
    return folder


class Started(BaseException):
    """The training began its first step."""


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_stops_before_the_first_step(mistake, tmp_path, tiny_checkpoint, trained, monkeypatch, capfd):
    def started(*args, **kwargs):
        raise Started

    monkeypatch.setattr(ComparisonTrainer, "training_step", started)
    monkeypatch.chdir(tmp_path)
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    shutil.copytree(trained / "data", tmp_path / "data")
    if mistake.trained:
        shutil.copytree(trained / "out", tmp_path / "out")
    mistake.spoil(tmp_path)
    here = {"DATA": str(tmp_path / "data/pairs.jsonl"), "HERE": str(tmp_path)}

    def filled(value: Any) -> Any:
        for name, path in here.items():
            value = value.replace(name, path) if isinstance(value, str) else value
        return value

    before = contents(tmp_path)
    keys = {"max_steps": 2, **{key: filled(value) for key, value in mistake.keys.items()}}
    line = short_training(tmp_path / "model", tmp_path / "data/pairs.jsonl", tmp_path / "out", **keys)
    if mistake.config is not None:
        (tmp_path / "config.yaml").write_text(mistake.config)
        written = mistake.config.partition(":")[0]
        line = words(config="config.yaml") + without_key(line, written)
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.app(["train", *line], exit_on_error=False))
    output = capfd.readouterr().err
    assert stopped.value.code, "it ended in success"
    [sentence] = [text for text in output.splitlines() if text.startswith("error: ")]
    assert output.rstrip().endswith(sentence) and "Traceback" not in output
    assert filled(mistake.sentence) in sentence
    assert contents(tmp_path).items() >= before.items(), "something was lost or changed"


def without_key(line: list[str], key: str) -> list[str]:
    """Return the words without a key of a single value, so that the file's counts."""
    if f"--{key}" not in line:
        return line
    position = line.index(f"--{key}")
    return line[:position] + line[position + 2 :]
