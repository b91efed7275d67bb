"""The Python way: TRL's quick start with another import, and functions that equal the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

import vlmrm
from tests.runs import SHORT, assert_equal_weights, colour_pairs, logged, words
from vlmrm import RewardConfig, RewardTrainer, evaluate, load_scorer, train
from vlmrm.errors import ConfigError, DataError

TWO_STEPS = {**SHORT, "max_steps": 2, "save_steps": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory, without what HF's trainer leaves in the environment."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pictures(count: int) -> Dataset:
    """The rows of `colour_pairs`, with decoded pictures instead of files."""
    file = colour_pairs(Path("data"), count)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return Dataset.from_list([{**row, "images": [Image.open(file.parent / row["images"][0])]} for row in rows])


def test_the_trl_quick_start_trains_after_changing_imports(folder, tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    dataset = Dataset.from_list(
        [{"prompt": f"Two plus {i}?", "chosen": str(2 + i), "rejected": str(3 + i)} for i in range(3)]
    )

    trainer = RewardTrainer(model=str(tiny_checkpoint), train_dataset=dataset)
    trainer.train()

    assert trainer.state.global_step == 3
    assert Path(f"{tiny_checkpoint.name}-Reward/final/COMPLETE.json").exists()


def test_objects_functions_and_command_train_bit_identically(folder, tiny_checkpoint):
    dataset = pictures(6)
    trainer = RewardTrainer(
        model=tiny_checkpoint,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        args=RewardConfig(output_dir="object", **TWO_STEPS),
    )
    result = trainer.train()
    keys = {"model_name_or_path": tiny_checkpoint, **TWO_STEPS}
    train(keys, dataset_path=dataset, output_dir="mapping")
    from_file = train([*words(**keys), "--dataset_path=data/pairs.jsonl", "--output_dir=words"])

    losses = [logged(Path(name, "checkpoint-2"), "loss") for name in ("object", "mapping", "words")]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2
    for name in ("mapping", "words"):
        assert_equal_weights(result.model_dir, Path(name, "final"))
    assert trainer.evaluate()["eval_pairs"] == 2
    trainer.save_model("copy")
    assert_equal_weights(Path("copy"), from_file.model_dir)

    swept = evaluate(model_dirs="object", dataset_path=dataset, output_file="results.csv", interventions="none")
    [row] = swept.rows
    assert (row["checkpoint"], row["sample_count"], row["error"]) == ("checkpoint-2", 6, None)
    assert load_scorer("copy").score_groups([("Two?", ["2", "3"])])


def test_trainers_take_selections_and_peft_lora_keys(folder, tiny_checkpoint):
    from peft import LoraConfig

    dataset = pictures(6).select([5, 3])
    trainer = RewardTrainer(
        tiny_checkpoint,
        RewardConfig(output_dir="out", **TWO_STEPS),
        dataset,
        peft_config=LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]),
    )
    assert [row["comparison"].id for row in trainer.train_dataset] == ["pair-5", "pair-3"]
    assert trainer.args.lora_r == 2 and {"q_proj"} == {
        name.split(".")[-4] for name, _ in trainer.model.named_parameters() if "lora_A" in name
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": 3}, "model is a int"),
        ({"train_dataset": None}, "dataset_path is missing"),
        ({"train_dataset": DatasetDict(train=Dataset.from_dict({"a": [1]}))}, "train_dataset has the splits train"),
        ({"train_dataset": [1]}, "train_dataset is a list"),
        ({"train_dataset": Dataset.from_dict({"a": [1]})}, "train_dataset: "),
        ({"train_dataset": Dataset.from_dict({"a": [1]}).with_transform(len)}, "train_dataset has a transform"),
        ({"args": {"learning_rate": 1}}, "args is a dict"),
    ],
)
def test_unusable_training_input_is_one_sentence(folder, tiny_checkpoint, change, sentence):
    rows = Dataset.from_dict({"prompt": ["?"], "chosen": ["a"], "rejected": ["b"]})
    with pytest.raises((ConfigError, DataError), match=sentence):
        RewardTrainer(**{"model": tiny_checkpoint, "train_dataset": rows, **change})


def test_configurations_warn_of_nothing_and_refuse_textual_numbers(folder, recwarn):
    config = RewardConfig(output_dir="out", bf16=False)
    assert config.gradient_checkpointing and not [it for it in recwarn if issubclass(it.category, FutureWarning)]
    for key in ("learning_rate", "max_pixels", "num_train_epochs", "lora_r"):
        with pytest.raises(ConfigError, match=f"{key} is 'high': it must be a number"):
            RewardConfig(output_dir="out", bf16=False, **{key: "high"})


def test_in_memory_data_resolves_paths_from_image_root(folder, tiny_checkpoint):
    file = colour_pairs(Path("data"), 4)
    keys = {"model": tiny_checkpoint, "train_dataset": Dataset.from_json(str(file))}
    with pytest.raises(DataError, match="does not exist: check the path, or name its folder as image_root"):
        RewardTrainer(**keys, args=RewardConfig(output_dir="a", bf16=False))
    RewardTrainer(**keys, args=RewardConfig(output_dir="b", bf16=False, image_root="data"))


def test_mistyped_keys_name_neighbours_and_imports_stay_light(folder):
    with pytest.raises(ConfigError, match="unknown key 'learning_rte': did you mean learning_rate"):
        train(learning_rte=1)
    with pytest.raises(ConfigError, match=r"c\.yaml: unknown key 'x'"):
        Path("c.yaml").write_text("x: 1")
        evaluate("c.yaml")
    program = "import sys, vlmrm; dir(vlmrm); assert not {'torch', 'transformers', 'datasets'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert {name for name in dir(vlmrm) if name in vlmrm.__all__} == {*vlmrm.__all__}
