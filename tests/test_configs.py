"""Every configuration that the project ships, through the parsers of the programs that read them."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from vlmrm.config import FILE, parse, read_words
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.rewards import RewardArguments
from vlmrm.serving.settings import RewardSettings
from vlmrm.training.arguments import RewardTrainingArguments

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference.py"
CONFIGS = ROOT / "training_configs"
EVALUATION = ["demo_eval", "eval_config_example", "eval_config_example7b"]
TRAINING = sorted({path.stem for path in CONFIGS.iterdir()} - {*EVALUATION})


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Argument classes of HF look at the launcher's variables, and set some of DeepSpeed's and the compiler's."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


CLASSES = (ModelArguments, DataArguments, RewardTrainingArguments)


def training(name: str, *words: str) -> tuple[ModelArguments, DataArguments, RewardTrainingArguments]:
    return parse(CLASSES, [str(CONFIGS / f"{name}.yaml"), *words], "train_rm.py")  # ty: ignore[invalid-return-type]


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_configuration_is_parsed(name):
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    model, data, args = training(name)
    for key, value in content.items():
        owner = next(group for group in (model, data, args) if hasattr(group, key))
        result = getattr(owner, key)
        if key in ("dataset_path", "eval_dataset_path"):
            assert result == [value]
        elif key == "deepspeed":
            assert Path(result).resolve() == ROOT / value
        elif key == "report_to":
            assert result == []
        else:
            assert result == value, key
    assert args.bf16 is content["bf16"]


@pytest.mark.parametrize("name", EVALUATION)
def test_an_evaluation_configuration_is_parsed(name):
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    args, data = parse((EvaluationArguments, DataArguments), [str(CONFIGS / f"{name}.yaml")], "eval_rm.py")
    for key, value in content.items():
        result = getattr(args if hasattr(args, key) else data, key)
        assert result == ([value] if key == "dataset_path" else value), key


@pytest.mark.parametrize(("name", "stage"), [("7b_config", 2), ("72b_config", 3)])
def test_deepspeed_takes_its_auto_values_from_the_configuration(name, stage):
    args = training(name, "--learning_rate", "1e-5")[2]
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    args.hf_deepspeed_config.trainer_config_finalize(args, model, num_training_steps=10)
    config = args.hf_deepspeed_config.config
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"]["enabled"] is True and config["fp16"]["enabled"] is False
    assert config["gradient_accumulation_steps"] == args.gradient_accumulation_steps
    assert "auto" not in str(config)


@pytest.mark.parametrize(("word", "name"), [("bf16", "bfloat16"), ("fp32", "float32"), ("float16", "float16")])
def test_a_dtype_has_equal_words_everywhere(tmp_path, word, name):
    config = tmp_path / "config.yaml"
    config.write_text(f"dtype: {word}")
    [model] = parse([ModelArguments], [str(config)], "train_rm.py")
    [evaluation] = parse([EvaluationArguments], ["--dtype", word, "--model_dirs", "x"], "eval_rm.py")
    served = RewardSettings(reward_type="vlm_reward", dtype=word)
    assert {model.dtype, evaluation.dtype, served.dtype} == {name}
    assert RewardArguments(reward_model="vlm_reward", dtype=word, device="cpu").dtype is getattr(torch, name)


@pytest.mark.parametrize("word", ["null", "None", "false", ""])
def test_deepspeed_of_a_configuration_is_switched_off(word, tmp_path):
    assert training("7b_config", "--deepspeed", word)[2].deepspeed is None
    config = tmp_path / "config.yaml"
    config.write_text("deepspeed: " + (word or '""'))
    assert parse(CLASSES, [str(config)], "train_rm.py")[2].deepspeed is None


def test_the_page_of_keys_is_up_to_date():
    reference = runpy.run_path(str(REFERENCE))
    assert reference["PAGE"].read_text(encoding="utf-8") == reference["page"](), "run python docs/reference.py"


def test_the_declared_keys_are_those_of_the_classes():
    reference = runpy.run_path(str(REFERENCE))
    declared, written = json.loads(reference["keys"]()), json.loads(FILE.read_text())
    if declared["train"]["versions"] != written["train"]["versions"]:
        pytest.skip("other versions of the libraries than the declared ones: the check of words is off too")
    assert declared == written, "run python docs/reference.py"


@pytest.mark.parametrize(
    "words",
    [
        *(["--learning_rte", "1"], ["--learning-rate=fast"], ["--no_check_sight", "--head", "tree"]),
        *(["--bf16", "maybe"], ["--lr_scheduler_type", "cosinus"], ["--learning_rate", "null"]),
        *(["nope.yaml"], ["bad.yaml"], ["deepspeed.yaml"], ["--config"]),
    ],
)
def test_declaration_and_classes_report_mistakes_alike(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("learning_rate: fast\n")
    Path("deepspeed.yaml").write_text("deepspeed: zero9.json\n")
    said = []
    for call in (read_words, lambda command, words: parse(CLASSES, words, command)):
        with pytest.raises(ConfigError) as caught:
            call("train", words)
        said.append(str(caught.value).replace("string_to_bool", "bool"))
    assert said[0] == said[1] or ("--bf16" in said[0] and "--bf16" in said[1])


def test_every_configuration_passes_the_check_of_words():
    for name in TRAINING:
        read_words("train", [str(CONFIGS / f"{name}.yaml"), "--use_peft", "--no-check-files", "--max-pixels=null"])
    for name in EVALUATION:
        read_words("eval", [str(CONFIGS / f"{name}.yaml"), "--group_by", "a", "b"])


def test_metric_tables_in_the_guide_match_declarations():
    reference = runpy.run_path(str(REFERENCE))
    guide = reference["GUIDE"].read_text(encoding="utf-8")
    assert guide == reference["with_tables"](guide), "run python docs/reference.py"
    benchmarks = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert benchmarks == reference["with_benchmarks"](benchmarks), "run python docs/reference.py"
