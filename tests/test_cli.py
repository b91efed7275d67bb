"""The help of the command line imports no heavy library, and so is instant."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from vlmrm import cli
from vlmrm.errors import ConfigError

HEAVY = "{'torch', 'transformers', 'trl', 'datasets', 'pandas', 'numpy', 'PIL', 'matplotlib'}"


def test_help_imports_nothing_heavy_and_lists_every_verb():
    program = f"""
import sys
from vlmrm import cli
from vlmrm.errors import ConfigError
try:
    cli.app(["--help"])
except SystemExit:
    pass
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in (
        "train",
        "eval",
        "report",
        "card",
        "score",
        "check-data",
        "rulers",
        "init-tiny",
        "merge",
        "export",
        "frames",
        "demo",
    ):
        assert f" {verb} " in done.stdout, verb


def test_help_and_typos_of_the_verbs_with_many_keys_import_nothing_heavy():
    program = f"""
import sys
from vlmrm import cli
from vlmrm.errors import ConfigError
for words in ("train --help", "train --help-all", "eval --help", "check-data -h", "train --lerning_rate=1"):
    try:
        cli.run(lambda: cli.app(words.split()))
    except SystemExit as ended:
        print("status", ended.code)
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    short, every, evaluation, checking = done.stdout.split("Usage: vlmrm ")[1:]
    assert len(short.splitlines()) <= 110 and all(len(line) <= 120 for line in short.splitlines())
    for key in ("--model_name_or_path", "--lora_r [16]", "--output_dir", "--report_to"):
        assert key in short and key in every
    assert "--adam_beta1" not in short and "--adam_beta1 [0.9]" in every
    assert "--model_dirs" in evaluation and "--media_sample" in checking
    assert done.stderr == "error: unknown argument --lerning_rate: did you mean --learning_rate?\n"


def test_errors_and_the_parser_import_nothing_heavy():
    program = f"import sys, vlmrm.config, vlmrm.errors; assert not {HEAVY} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("words", [["demo"], ["frames", "demo"], ["serve", "prepare", "--config", "service.toml"]])
def test_ctrl_c_is_said_with_a_status_of_its_own(words, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    for name in (
        "vlmrm.commands.demo.run_demo",
        "vlmrm_robots.policies.demo.run_demo",
        "vlmrm.serving.worker_spec.prepare",
    ):
        monkeypatch.setattr(name, interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: cli.app(words))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_the_command_is_imported_is_said_too():
    program = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
import runpy
runpy.run_module("vlmrm", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_help_of_a_verb_shows_examples_of_its_own(capsys):
    def check(app, *words):
        own = {"train", "plan", "eval", "check-data"}  # whose help is of their keys
        for name in (it for it in app if not it.startswith("-") and (words or it not in own)):
            cli.app([*words, name, "--help"], result_action="return_value")
            examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" vlmrm ")]
            command = " ".join(["vlmrm", *words, name])
            assert examples and all(f"{line} ".startswith(f" {command} ") for line in examples), command
            check(app[name], *words, name)

    check(cli.app)
    for example in (*cli.EXAMPLES, *cli.EXAMPLES_OF_VERBS):
        cli.app.parse_args(shlex.split(example), exit_on_error=False, print_error=False)


def test_completion_is_installed_into_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.app(["--install-completion", "--shell", "bash", "--output", str(tmp_path / "completion")])
    assert not ended.value.code
    script = (tmp_path / "completion").read_text()
    words = ["train --learning", "plan --overlong ''", "eval --model_d", "check-data --media"]
    complete = f"source {tmp_path}/completion; it() {{ COMP_WORDS=($@); COMP_CWORD=$(($# - 1)); _vlmrm; }}; "
    complete += "; ".join(f"it vlmrm {word}; echo ${{COMPREPLY[@]}}" for word in words)
    done = subprocess.run(["bash", "-c", complete], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["--learning_rate", "drop trim error", "--model_dirs", "--media_sample", ""], (
        script
    )


def test_a_service_with_several_rewards_asks_for_model(monkeypatch, capsys):
    def refuse(*args):
        raise ConfigError("http://host: a request names no reward: choose from a, b.")

    monkeypatch.setattr("vlmrm.scoring.remote.RemoteScorer.score_groups", refuse)
    with pytest.raises(SystemExit):
        cli.run(lambda: cli.app(["score", "--url", "http://host", "--prompt", "?", "--response", "a"]))
    assert capsys.readouterr().err == (
        "error: http://host: a request names no reward: choose from a, b with --model NAME.\n"
    )


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("https://host/cat.jpg", "https://host/cat.jpg is on the network: download"),
        ("no.jpg", "no.jpg does not exist"),
    ],
)
def test_a_picture_is_looked_for_before_the_model(image, sentence, capsys):
    for option in ("--image", "--response-image"):
        with pytest.raises(SystemExit) as stopped:
            cli.run(
                lambda option=option: cli.app(
                    ["score", "--model", "m", "--prompt", "?", "--response", "a", option, image]
                )
            )
        assert stopped.value.code == 3 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", [["demo", "--output"], ["frames", "demo", "--output"], ["init-tiny"]])
@pytest.mark.parametrize("name", ["notes.txt", "notes.txt/below"])
def test_a_file_in_the_place_of_a_folder_is_said_in_one_sentence(words, name, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: cli.app([*words, str(tmp_path / name)]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path / name} ")
    assert (tmp_path / "notes.txt").read_text() == "mine"
