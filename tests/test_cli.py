"""The help of the command line imports no heavy library, and so is instant."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from vlmrm import cli

HEAVY = "{'torch', 'transformers', 'trl', 'datasets', 'pandas', 'numpy', 'PIL', 'matplotlib'}"


def test_help_and_typos_import_nothing_heavy():
    program = f"""
import sys
from vlmrm import cli
from vlmrm.errors import ConfigError
for words in ("--help", "train --help", "train --help-all", "eval --help", "check-data -h", "train --lerning_rate=1"):
    try:
        cli.run(lambda: cli.app(words.split()))
    except SystemExit as ended:
        print("status", ended.code)
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verbs, short, every, evaluation, checking = done.stdout.split("Usage: vlmrm ")[1:]
    for verb in ["train", "eval", "report", "card", "score", "check-data", "rulers", "export", "frames", "demo"]:
        assert f" {verb} " in verbs
    assert len(short.splitlines()) <= 110 and all(len(line) <= 120 for line in short.splitlines())
    for key in ("--model_name_or_path", "--lora_r [16]", "--output_dir", "--report_to"):
        assert key in short and key in every
    assert "--adam_beta1" not in short and "--adam_beta1 [0.9]" in every
    assert "--model_dirs" in evaluation and "--media_sample" in checking
    assert done.stderr == "error: unknown argument --lerning_rate: did you mean --learning_rate?\n"


@pytest.mark.parametrize("words", [["demo"], ["frames", "demo"], ["serve", "prepare", "--config", "service.toml"]])
def test_ctrl_c_ends_with_its_own_status(words, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    for name in ("commands.demo.run_demo", "serving.worker_spec.prepare"):
        monkeypatch.setattr(f"vlmrm.{name}", interrupted)
    monkeypatch.setattr("vlmrm_robots.frames.demo.run_demo", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: cli.app(words))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_of_each_verb_shows_its_own_examples(capsys):
    def check(app, *words):
        own = {"train", "plan", "eval", "calibrate", "check-data"}  # whose help is of their keys
        for name in (it for it in app if not it.startswith("-") and (words or it not in own)):
            cli.app([*words, name, "--help"], result_action="return_value")
            examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" vlmrm ")]
            command = " ".join(["vlmrm", *words, name])
            assert examples and all(f"{line} ".startswith(f" {command} ") for line in examples), command
            check(app[name], *words, name)

    check(cli.app)
    for example in (*cli.EXAMPLES, *cli.EXAMPLES_OF_VERBS):
        cli.app.parse_args(shlex.split(example), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("option", ["--image", "--response-image"])
@pytest.mark.parametrize(("image", "said"), [("https://host/cat.jpg", "download"), ("no.jpg", "does not exist")])
def test_a_picture_is_looked_for_before_the_model(option, image, said, capsys):
    words = ["score", "--model", "m", "--prompt", "?", "--response", "a", option, image]
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.app(words))
    assert stopped.value.code == 3 and f"{image} " in (error := capsys.readouterr().err) and said in error
