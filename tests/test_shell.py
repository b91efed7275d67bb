"""The launch scripts, with programs that say how they were called instead of running."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = "training_configs/7b_config.yaml"

STAND_IN = """#!/bin/bash
echo "pid $$ threads ${OMP_NUM_THREADS:-unset} gpus ${CUDA_VISIBLE_DEVICES:-unset}"
printf '%s\\n' "${0##*/}" "$@"
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout of the scripts with one configuration, and an environment of stand-ins in .venv."""
    folder = tmp_path / "check out"  # a space, as in a stranger's home
    for name in ("run_distributed.sh", "run_eval.sh", CONFIG):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "training_configs" / "eval_config_example.yaml", folder / "training_configs")
    stand_ins(folder / ".venv" / "bin")
    (folder / "tools").mkdir()
    for name in ("bash", "dirname", "cat"):  # and no torchrun of this machine
        (folder / "tools" / name).symlink_to(str(shutil.which(name)))
    return folder


def stand_ins(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("torchrun", "python3"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    return folder


def run(script: Path, *words: str, cwd: Path | None = None, active: Path | None = None, **environment: str):
    """Run the script; return its process id, exit status, output lines and error text."""
    path = [str(active)] if active else []
    path.append(str(script.parent / "tools"))
    process = subprocess.Popen(
        [str(script), *words],
        cwd=cwd or script.parent,
        env={"PATH": ":".join(path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=300)
    return process.pid, process.returncode, output.splitlines(), errors


@pytest.fixture
def free_port():
    """A port where nobody listens, and during the test nobody can: it is bound."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield str(bound.getsockname()[1])


def test_one_machine(checkout, free_port):
    words = ["--gpus", "4", "--port", free_port, "--config", CONFIG]
    pid, status, lines, _ = run(
        checkout / "run_distributed.sh", *words, "--", "--learning_rate", "5e-6", "--run_name", "a b"
    )
    assert status == 0
    # The same process: a signal to the script is a signal to torchrun.
    assert lines[0] == f"pid {pid} threads 1 gpus unset"
    launcher = ["torchrun", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "4"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", free_port]
    program = [f"{checkout}/train_rm.py", CONFIG]
    assert lines[1:] == [*launcher, *program, "--learning_rate", "5e-6", "--run_name", "a b"]


def test_several_machines(checkout):
    words = "--nodes 2 --node-rank 1 --master-addr node0 --config training_configs/7b_config.yaml"
    _, status, lines, _ = run(checkout / "run_distributed.sh", *words.split(), OMP_NUM_THREADS="3")
    assert status == 0 and "threads 3" in lines[0]
    expected = "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node0 --master-port 29500"
    assert lines[2:12] == expected.split()


def test_scripts_work_from_another_directory(checkout, free_port, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.yaml").touch()
    config = CONFIG
    script = checkout / "run_distributed.sh"
    assert f"{checkout}/{config}" in run(script, "--port", free_port, "--config", config, cwd=elsewhere)[2]
    assert "mine.yaml" in run(script, "--port", free_port, "--config", "mine.yaml", cwd=elsewhere)[2]
    assert run(checkout / "run_eval.sh", cwd=elsewhere)[2][2:] == [
        f"{checkout}/eval_rm.py",
        f"{checkout}/training_configs/eval_config_example.yaml",
    ]


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("run_distributed.sh", "", "--config FILE is missing"),
        ("run_distributed.sh", CONFIG, f"'{CONFIG}'"),
        ("run_distributed.sh", "--gpus --port 1", "--gpus needs a value"),
        ("run_distributed.sh", "--config nowhere.yaml", "nowhere.yaml"),
        ("run_distributed.sh", f"--config {CONFIG} --gpus four", "--gpus is 'four'"),
        ("run_distributed.sh", f"--config {CONFIG} --port 70000", "--port is '70000'"),
        ("run_distributed.sh", f"--config {CONFIG} --nodes 2", "--nodes 2 needs --master-addr"),
        ("run_distributed.sh", f"--config {CONFIG} --node-rank 1", "--node-rank is '1'"),
        ("run_eval.sh", "nowhere.yaml", "nowhere.yaml"),
        ("run_eval.sh", f"{CONFIG} 0,", "GPU is '0,'"),
        ("run_eval.sh", f"{CONFIG} 0 1", "too many words"),
        ("run_eval.sh", "--gpus 1", "'--gpus'"),
    ],
)
def test_a_wrong_launch_is_one_sentence(checkout, script, words, expected):
    _, status, lines, errors = run(checkout / script, *words.split())
    assert (status, lines) == (2, [])
    assert expected in errors and errors.count("\n") == 1


def test_a_port_in_use_is_one_sentence(checkout):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        words = ["--config", CONFIG, "--port", port]
        _, status, lines, errors = run(checkout / "run_distributed.sh", *words)
    assert (status, lines) == (2, [])
    assert f"port {port} is in use" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("script", ["run_distributed.sh", "run_eval.sh"])
def test_without_an_installation_the_sentence_says_to_install(checkout, free_port, script):
    shutil.rmtree(checkout / ".venv")
    words = ["--port", free_port, "--config", CONFIG] if script.startswith("run_d") else []
    _, status, _, errors = run(checkout / script, *words)
    assert status == 2 and "pip install -e '.[train]'" in errors and errors.count("\n") == 1


def test_eval_on_one_gpu(checkout):
    words = [CONFIG, "3", "--", "--max_eval_samples", "5"]
    pid, status, lines, _ = run(checkout / "run_eval.sh", *words)
    assert status == 0 and lines[0] == f"pid {pid} threads unset gpus 3"
    program = [f"{checkout}/eval_rm.py", CONFIG]
    assert lines[1:] == ["python3", *program, "--max_eval_samples", "5"]


def test_eval_on_several_gpus(checkout):
    _, status, lines, _ = run(checkout / "run_eval.sh", CONFIG, "0,2,5")
    assert status == 0 and lines[0].endswith("gpus 0,2,5")
    assert lines[1:5] == ["torchrun", "--standalone", "--nproc-per-node", "3"]
