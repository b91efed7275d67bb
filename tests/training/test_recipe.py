"""`vlmrm init`: what it chooses for which machine, and that its configuration starts as it stands."""

from __future__ import annotations

import pytest
import yaml

from tests.runs import colour_pairs, text_pairs, words, write_rows
from vlmrm import cli
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError, DataError
from vlmrm.training import train
from vlmrm.training.arguments import RewardTrainingArguments, RunArguments
from vlmrm.training.recipe import DataFacts, Machine, choose_method, configuration, facts_of_data

DATA = DataFacts(("pairs.jsonl",), rows=20_000, images=True, held_out=0.05)
SMALL, MIDDLE, LARGE = 3.8e9, 8.3e9, 73e9  # parameters


def gpus(count: int, gigabytes: float, **keys) -> Machine:
    return Machine(count, gigabytes * 1e9, 200e9, bfloat16=True, **keys)


def written(machine: Machine, parameters: float = SMALL, data: DataFacts = DATA) -> dict:
    return yaml.safe_load(configuration(data, "a/b", choose_method(parameters, machine), machine, "mine.yaml"))


def facts_of(paths, **keys) -> DataFacts:
    return facts_of_data(DataArguments([str(path) for path in paths], bad_rows="skip", **keys))


CPU = Machine(0, 0, 64e9, bfloat16=False)
COUNTS = (("many", 1000), ("some", 300), ("few", 33))  # of prompts


@pytest.mark.parametrize(
    ("machine", "parameters", "method"),
    [
        (gpus(1, 24), SMALL, "LoRA"),
        (gpus(1, 16), MIDDLE, "QLoRA"),
        (gpus(1, 80), SMALL, "LoRA"),  # 61 GB of weights and optimizer leave too little for activations
        (gpus(1, 141), SMALL, "whole"),
        (gpus(4, 80), SMALL, "whole with ZeRO-2"),
        (gpus(4, 48), MIDDLE, "whole with ZeRO-3"),
        (gpus(4, 80, deepspeed=False), SMALL, "LoRA"),
        (gpus(8, 80), LARGE, "QLoRA"),
        (CPU, SMALL, "LoRA"),
        (CPU, 1e6, "small"),
    ],
    ids=str,
)
def test_weights_are_trained_whole_only_where_they_fit(machine, parameters, method):
    assert str(choose_method(parameters, machine)) == method


def test_a_model_too_large_is_refused_by_size():
    with pytest.raises(ConfigError, match=r"73 B parameters do not fit into 1 GPU of 24 GB: name a smaller"):
        choose_method(LARGE, gpus(1, 24))
    with pytest.raises(ConfigError, match=r"or install QLoRA"):
        choose_method(LARGE, gpus(1, 80, quantization=False))


def test_several_gpus_launch_together_and_share_a_step():
    values = written(gpus(8, 80))
    assert "./run_distributed.sh --gpus 8 --config mine.yaml" in configuration(
        DATA, "a/b", choose_method(SMALL, gpus(8, 80)), gpus(8, 80), "mine.yaml"
    )
    assert values["per_device_train_batch_size"] * 8 == 32
    assert values["deepspeed"]["zero_optimization"]["stage"] == 2


def test_images_are_limited_to_what_the_machine_computes():
    assert written(gpus(1, 24))["max_pixels"] == 512 * 28 * 28
    assert "max_pixels" not in written(gpus(1, 24), data=DataFacts(("p",), 1000, False, 0.05))


@pytest.mark.parametrize("machine", [gpus(1, 24), gpus(1, 10), gpus(8, 80), CPU], ids=str)
def test_every_written_configuration_is_read_without_complaint(machine, tmp_path, monkeypatch):
    """On a machine without GPUs, of which only the parsing of bf16 and ZeRO is tried."""
    text = configuration(DATA, "a/b", choose_method(SMALL, machine), machine)
    (tmp_path / "config.yaml").write_text(text)
    run = RunArguments.parse([str(tmp_path / "config.yaml"), "--use_cpu", "true"], "test")
    assert isinstance(run.training, RewardTrainingArguments)
    assert all(len(line) < 140 for line in text.splitlines())


def test_data_facts_are_read_from_a_sample(tmp_path):
    facts = facts_of([colour_pairs(tmp_path / "data", 60)])
    assert (facts.rows, facts.held_out, facts.bad_share) == (60, 0.2, 0.0)
    assert facts.images
    two = facts_of([text_pairs(tmp_path / "two", 2)])
    assert two.held_out == 0.0 and not two.images
    broken = write_rows(tmp_path / "broken.jsonl", [{"prompt": "?", "chosen": "a", "rejected": "a"}] * 3)
    with pytest.raises(DataError, match="3 of 3 sampled rows cannot be read"):
        facts_of([broken])


def test_numbers_beside_single_answers_become_outputs(tmp_path, tiny_checkpoint):
    rows = [{"prompt": f"{i}?", "response": "a", "stars": i % 5 + 1, "light": i / 40, "row_id": i} for i in range(40)]
    data = write_rows(tmp_path / "rated.jsonl", rows)
    facts = facts_of([data])
    assert facts.reading["outputs"] == {"stars": "ordinal 1-5", "light": "rating 0-1"}
    assert written(CPU, data=facts)["metric_for_best_model"] == "stars_rank"
    line = ["init", str(data), "--model", str(tiny_checkpoint), "--output", str(tmp_path / "mine.yaml"), "--columns"]
    line += ["clear=stars", "--outputs", "light=correctness", "clear=rating 1-5"]
    cli.app(line, exit_on_error=False, result_action="return_value")
    named = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert named["columns"] == {"clear": "stars"} and named["metric_for_best_model"] == "light_auc"
    assert named["outputs"] == {"light": "correctness", "clear": "rating 1-5"}


def test_the_held_out_share_has_enough_prompts(tmp_path, capsys, tiny_checkpoint):
    """Rows say little of how many prompts there are, and an accuracy of few of these says nothing."""
    of = {name: [{"query": f"{i % n}?", "chosen": "a", "rejected": str(i)} for i in range(1000)] for name, n in COUNTS}
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in of.items()}
    many, some, few = (facts_of([path], columns={"prompt": "query"}) for path in paths.values())
    assert (many.held_out, some.held_out, few.held_out) == (0.05, 0.1, 0.2)
    assert many.held_out_prompts >= 20 <= some.held_out_prompts and few.held_out_prompts < 10
    output = tmp_path / "few.yaml"
    words = ["init", str(paths["few"]), "--model", str(tiny_checkpoint), "--output", str(output)]
    cli.app([*words, "--columns", "prompt=query"], exit_on_error=False, result_action="return_value")
    written = yaml.safe_load(output.read_text())
    assert (written["columns"], written["eval_fraction"]) == ({"prompt": "query"}, 0.2)
    assert f"holds out {few.held_out_prompts} prompts, too few to tell" in capsys.readouterr().out


def test_a_written_configuration_trains_and_is_never_overwritten(tmp_path, tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = colour_pairs(tmp_path / "data", 30)
    line = ["init", str(data), "--model", str(tiny_checkpoint), "--output", "mine.yaml"]
    cli.app(line, exit_on_error=False, result_action="return_value")
    assert "vlmrm plan mine.yaml" in capsys.readouterr().out
    text = (tmp_path / "mine.yaml").read_text()
    with pytest.raises(ConfigError, match=r"mine\.yaml exists"):
        cli.app(line, exit_on_error=False, result_action="return_value")
    assert (tmp_path / "mine.yaml").read_text() == text
    result = train(["mine.yaml", *words(max_steps=2, eval_steps=1, save_steps=1, dataloader_num_workers=0)])
    assert result.model_dir.name == "best" and (result.model_dir / "COMPLETE.json").is_file()
    assert "too few to tell" in capsys.readouterr().err
