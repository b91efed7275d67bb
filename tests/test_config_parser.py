"""The configuration parser: what wins, what is refused, and what the message says."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from vlmrm.config import parse
from vlmrm.errors import ConfigError
from vlmrm.settings import load_file


class When(StrEnum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Keys:
    learning_rate: float = 1e-5
    batch_size: int = 8
    name: str = "run"
    limit: int | None = None
    shuffle: bool = True
    quick: bool = False
    when: When | str = When.NO
    paths: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    options: dict | str | None = None
    head: str = field(default="linear", metadata={"choices": ["linear", "mlp"]})
    deepspeed: str | None = None


@pytest.fixture
def read(tmp_path):
    """`read(text, *words)`: the keys that a file of `text` and the command-line words give."""

    def read(text: str, *words: str, name: str = "config.yaml") -> Keys:
        path = tmp_path / name
        path.write_text(text)
        return parse([Keys], [str(path), *words], "test")[0]

    return read


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?"))
    return message


def test_command_line_beats_file_beats_defaults(read):
    keys = read("learning_rate: 2e-5\nbatch_size: 4", "--learning_rate", "3e-5")
    assert (keys.learning_rate, keys.batch_size, keys.name) == (3e-5, 4, "run")


def test_the_file_may_be_named_in_three_ways(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: 4")
    for words in ([str(path)], ["--config", str(path)], ["--name", "x", f"--config={path}"]):
        assert parse([Keys], words, "test")[0].batch_size == 4
    assert parse([Keys], ["--batch_size", "5"], "test")[0].batch_size == 5


def test_json_is_read_as_yaml_is(read):
    keys = read('{\n\t"learning_rate": 2e-5,\n\t"paths": ["a", "b"]\n}', name="config.json")
    assert (keys.learning_rate, keys.paths) == (2e-5, ["a", "b"])
    assert "batch_size" in refusal(lambda: read('{"batch_size": 1, "batch_size": 2}', name="config.json"))
    assert "not valid JSON" in refusal(lambda: read("{", name="config.json"))


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-5", "learning_rate", 1e-5),
        ("learning_rate: 1.0e-5", "learning_rate", 1e-5),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("name: 7", "name", "7"),
        ("limit: null", "limit", None),
        ("limit: ~", "limit", None),
        ("shuffle: no", "shuffle", False),
        ("quick: true", "quick", True),
        ("quick: 1", "quick", True),
        ("when: no", "when", When.NO),
        ("when: steps", "when", When.STEPS),
        ("paths: one", "paths", ["one"]),
        ("paths: [one, 2]", "paths", ["one", "2"]),
        ("weights: 2", "weights", [2.0]),
        ("weights: [1, 0.5]", "weights", [1.0, 0.5]),
        ("options: {min_lr: 1e-6, fused: true}", "options", {"min_lr": 1e-6, "fused": True}),
        ("head: mlp", "head", "mlp"),
    ],
)
def test_a_value_in_a_file_is_converted_as_on_the_command_line(read, line, key, value):
    result = getattr(read(line), key)
    assert result == value and type(result) in (type(value), str)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--limit", "null"], "limit"),
        (["--limit=null"], "limit"),
        (["--deepspeed", "null", "--learning_rate", "1"], "deepspeed"),
    ],
)
def test_null_on_the_command_line_is_no_value_even_where_the_file_has_one(tmp_path, words, key):
    config, engine = tmp_path / "config.yaml", tmp_path / "zero2.json"
    engine.write_text("{}")
    config.write_text("limit: 3\ndeepspeed: zero2.json")
    assert getattr(parse([Keys], [str(config), *words], "test")[0], key) is None


def test_null_is_a_word_where_a_value_is_needed():
    [keys] = parse([Keys], ["--name", "null"], "test")
    assert keys.name == "null"
    assert "--learning_rate" in refusal(lambda: parse([Keys], ["--learning_rate", "null"], "test"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate: fast", "learning_rate is 'fast': it must be a number"),
        ("learning_rate: true", "learning_rate is True: it must be a number"),
        ("learning_rate: {a: 1}", "learning_rate takes a value, not a mapping"),
        ("learning_rate:", "learning_rate is empty"),
        ("batch_size: 2.5", "batch_size is 2.5: it must be a whole number"),
        ("batch_size: [1, 2]", "batch_size takes one value, not a list"),
        ("shuffle: maybe", "shuffle is 'maybe': it must be true or false"),
        ("quick: [true]", "quick takes one value, not a list"),
        ("when: never", "when is 'never': choose from no, steps"),
        ("head: tree", "head is 'tree': choose from linear, mlp"),
        ("weights: [1, heavy]", "weights is 'heavy': it must be a number"),
        ("learning_rte: 1", "unknown key 'learning_rte': did you mean learning_rate?"),
        ("zzz: 1", "unknown key 'zzz'."),
        ("stage: rm\nlr: 1\nname: a", "unknown keys: 'stage', 'lr' (did you mean learning_rate?)."),
        ("batch_size: 1\nname: a\nbatch_size: 2", "key 'batch_size' is on line 1 and on line 3"),
        ("- a\n- b", "must hold `key: value` lines"),
        ("a: [", "is not valid YAML"),
        ("env: [A]", "env must hold `NAME: value` lines"),
        ("deepspeed: zero9.json", "deepspeed is 'zero9.json', but there is no such file"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_key(read, line, expected):
    message = refusal(read, line)
    assert expected in message and "config.yaml" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning_rte", "1"], "unknown argument --learning_rte: did you mean --learning_rate?"),
        (["--learning_rte=1"], "unknown argument --learning_rte: did you mean --learning_rate?"),
        (["--lr", "1", "--zzz=2"], "unknown arguments: --lr (did you mean --learning_rate?), --zzz."),
        (["pairs.jsonl", "--head", "mlp"], "pairs.jsonl holds data, and is no configuration: write --dataset_path"),
        (["--batch", "1"], "unknown argument --batch: did you mean --batch_size?"),
        (["--batch_size", "many"], "--batch_size"),
        (["--head", "tree"], "--head"),
        (["--config"], "--config needs a file"),
    ],
)
def test_a_bad_word_is_refused_with_its_neighbour(words, expected):
    assert expected in refusal(parse, [Keys], words, "test")


def test_two_files_are_one_too_many(read, tmp_path):
    assert "more than one" in refusal(read, "batch_size: 1", "--config", str(tmp_path / "config.yaml"))


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "7b_config.yaml").touch()
    message = refusal(load_file, tmp_path / "7b_confg.yaml")
    assert message.endswith("7b_config.yaml?")


def test_a_folder_or_binary_file_is_refused(tmp_path):
    assert "cannot be read" in refusal(load_file, tmp_path)
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(load_file, tmp_path / "c.yaml")


def test_env_sets_environment_variables(read, monkeypatch):
    monkeypatch.setenv("VLMRM_TEST_VARIABLE", "old")
    read("env:\n  VLMRM_TEST_VARIABLE: 3")
    assert os.environ["VLMRM_TEST_VARIABLE"] == "3"


def test_an_arguments_class_refusal_is_a_config_error():
    @dataclass
    class Picky:
        size: int = 1

        def __post_init__(self):
            if self.size > 1:
                raise ValueError("size is\n  too large.")

    assert refusal(parse, [Picky], ["--size", "2"], "test") == "size is too large."


def test_no_file_beside_the_script_is_read_unasked(tmp_path, monkeypatch):
    (tmp_path / "train_rm.args").write_text("--batch_size 99")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train_rm.py")])
    assert parse([Keys], [], "test")[0].batch_size == 8


def test_deepspeed_files_are_found_here_beside_the_configuration_and_above_it(tmp_path, monkeypatch):
    configs, elsewhere = tmp_path / "repository" / "training_configs", tmp_path / "elsewhere"
    configs.mkdir(parents=True), elsewhere.mkdir()
    config = configs / "c.yaml"
    config.write_text("deepspeed: zero2.json")
    monkeypatch.chdir(elsewhere)

    def result() -> Path:
        return Path(parse([Keys], [str(config)], "test")[0].deepspeed or "").resolve()

    for folder in (configs.parent, configs, elsewhere):
        (folder / "zero2.json").write_text("{}")
        assert result() == folder / "zero2.json"
