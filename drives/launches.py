"""Launches and faults: each works, or ends in one sentence: python drives/launches.py [PART OF A NAME]

For what needs processes of their own; tests/training/test_training_mistakes.py has what one process can get wrong.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from kills import Run, fork

from tests.preloaded import preload
from tests.runs import ROOT, colour_pairs, short_training
from vlmrm import cli
from vlmrm.logs import say

NOBODY = 65534
AUTO = {"resume_from_checkpoint": "auto"}
LONG = {"max_steps": 4000, "save_steps": 4000}


@dataclass(frozen=True)
class Fault:
    """A launch, what befalls it, and how it must end; `sentence` None is a run that works.

    Args:
        before: changes the folder of the run, or its own process before it starts.
        during: acts on the running processes.
        shell: runs the words of a real command line instead of a fork; WORDS and PYTHON are replaced.
    """

    name: str
    sentence: str | None
    keys: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    codes: Sequence[int] = ()
    before: Callable[[Path], Any] | None = None
    inside: Callable[[Path], Any] | None = None
    during: Callable[[Any, Path], Any] | None = None
    shell: str | None = None
    ranks: int = 1
    seconds: float = 120.0


def first_step(run: Any, folder: Path) -> None:
    """Wait until the run has trained a step."""
    deadline = time.monotonic() + 120
    while "step 1/" not in run.text() and run.running and time.monotonic() < deadline:
        time.sleep(0.01)
        run.reap()


def loading(run: Any, folder: Path) -> None:
    while "attn_implementation" not in run.text() and run.running:
        time.sleep(0.001)
        run.reap()


def in_save(run: Any, folder: Path) -> None:
    while not list(folder.glob("out/checkpoint-*")) and run.running:
        time.sleep(0.001)
        run.reap()


def then(wait: Callable[[Any, Path], None], *signals: int, pause: float = 0.0) -> Callable[[Any, Path], None]:
    """Return a fault that sends signals to the first process, one after another."""

    def act(run: Any, folder: Path) -> None:
        wait(run, folder)
        for number in signals:
            with suppress(ProcessLookupError):
                os.kill(run.running[0] if run.running else 0, number)
            time.sleep(pause)

    return act


def kill_worker(run: Any, folder: Path) -> None:
    first_step(run, folder)
    children = Path(f"/proc/{run.running[0]}/task/{run.running[0]}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


def trained(**keys: Any) -> Callable[[Path], None]:
    """Return a preparation: two steps of training in `out`."""

    def train(folder: Path) -> None:
        line = short_training(
            folder / "model", folder / "data/pairs.jsonl", folder / "out", max_steps=2, save_steps=2, **keys
        )
        os.waitpid(
            fork(lambda: cli.run(lambda: cli.app(["train", *line], exit_on_error=False)), folder / "before.log"), 0
        )

    return train


def limit(which: int, size: int) -> Callable[[Path], None]:
    def lower(folder: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(which, (size, size))

    return lower


def less_memory(folder: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)


def as_nobody(folder: Path) -> None:
    os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)


def taken_port() -> str:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    kept_open.append(taken)
    return str(taken.getsockname()[1])


kept_open: list[socket.socket] = []

TORCHRUN = "exec PYTHON -m torch.distributed.run --standalone --nproc_per_node=2 TRAIN WORDS"
ALONE = "exec PYTHON TRAIN WORDS"
TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def faults() -> Iterator[Fault]:
    # Launchers ---------------------------------------------------------------------------------------------------
    for name in ("zero1", "zero2", "zero3"):
        yield Fault(
            f"{name} without a launcher",
            None,
            {"deepspeed": f"HERE/{name}.json", "dtype": "float32"},
            before=zero(int(name[-1])),
        )
    yield Fault("two processes by torchrun", None, shell=TORCHRUN)
    yield Fault("WORLD_SIZE that is no number", "WORLD_SIZE", environment={"WORLD_SIZE": "two"}, codes=[2])
    yield Fault("WORLD_SIZE without RANK", "RANK", environment={"WORLD_SIZE": "2"}, codes=[2])
    yield Fault(
        "RANK without MASTER_ADDR",
        "MASTER_ADDR",
        environment={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        codes=[2],
    )
    yield Fault("a port in use", "cannot meet", environment={**TWO, "MASTER_PORT": taken_port()}, codes=[2])

    yield Fault("more ranks than rows", None, {"max_steps": 2, "max_train_samples": 1}, ranks=2)
    yield Fault("use_cpu false without a GPU", None, {"use_cpu": False})
    yield Fault("bfloat16 on this CPU", None, {"bf16": True})
    yield Fault("FSDP on a CPU", "fsdp is set", {"fsdp": "full_shard"}, ranks=2, codes=[2])
    # Places ------------------------------------------------------------------------------------------------------
    yield Fault(
        "output_dir is read-only",
        "cannot be written",
        {"output_dir": "HERE/closed/out"},
        codes=[2],
        before=lambda folder: (folder / "closed").mkdir(mode=0o555),
        inside=as_nobody,
    )
    yield Fault("working directory is read-only", None, shell=on_disk("ro", "mount -o remount,ro ro && cd ro"))
    yield Fault(
        "HF_HOME is not writable", "set HF_HOME", environment={"HF_HOME": "/proc/none"}, codes=[3], shell=ALONE
    )
    yield Fault("TMPDIR is not there", None, environment={"TMPDIR": "HERE/absent"}, shell=ALONE)
    yield Fault(
        "disk full in a save",
        "could not be saved",
        {"save_steps": 2},
        codes=[5],
        inside=limit(resource.RLIMIT_FSIZE, 400_000),
    )
    yield Fault("disk without room for a checkpoint", "a checkpoint takes", codes=[5], shell=on_disk("out", size="2m"))
    yield Fault(
        "disk full before the third checkpoint",
        "the disk is full",
        {"save_steps": 1},
        codes=[5],
        shell=on_disk("out", size="18m"),
    )
    fill = "touch {0}/.training.lock && head -c 4096 /dev/zero > {0}/.x; true"
    yield Fault("disk of logs is full", None, shell=on_disk("logs", fill.format("logs"), size="4k"))
    yield Fault(
        "disk of output_dir is full",
        "cannot be written",
        codes=[2],
        shell=on_disk("out", fill.format("out"), size="4k"),
    )
    yield Fault("standard input is closed", None, shell="exec PYTHON TRAIN WORDS <&-")
    yield Fault("standard output is closed", None, shell="exec PYTHON TRAIN WORDS >&-")
    yield Fault("standard error is closed", None, shell="exec PYTHON TRAIN WORDS 2>&-")
    yield Fault(
        "reader of the output goes away",
        None,
        shell="PYTHON TRAIN WORDS 2>&1 | head -1; exit ${PIPESTATUS[0]}",
        codes=[0],
    )
    # Memory and data ---------------------------------------------------------------------------------------------
    yield Fault(
        "out of memory",
        "memory",
        {"per_device_train_batch_size": 12, "batching": "reference", "max_steps": 50},
        inside=less_memory,
        before=large_images,
        codes=[5],
    )
    yield Fault(
        "a worker of the loader is killed",
        "a DataLoader worker was killed",
        {**LONG, "dataloader_num_workers": 1},
        during=kill_worker,
        codes=[1],
    )
    yield Fault(
        "images removed while it trains",
        "does not exist",
        LONG,
        codes=[3],
        during=lambda run, folder: (first_step(run, folder), [p.unlink() for p in folder.glob("data/*.png")]),
    )
    yield Fault(
        "output_dir removed while it trains",
        None,
        {"max_steps": 300, "save_steps": 300},
        during=lambda run, folder: (first_step(run, folder), shutil.rmtree(folder / "out")),
    )
    yield Fault(
        "a loss that is not finite",
        "lower learning_rate",
        codes=[5],
        keys={"learning_rate": 1e30, "max_grad_norm": 0.0, "save_steps": 1, "max_steps": 20, "warmup_steps": 2},
    )
    # Restarts ----------------------------------------------------------------------------------------------------
    yield Fault(
        "resumed by two processes",
        None,
        {"max_steps": 4, "per_device_train_batch_size": 1, **AUTO},
        ranks=2,
        before=trained(),
    )
    yield Fault(
        "resumed by two processes, with twice the rows",
        "rows_per_step",
        {"max_steps": 4, **AUTO},
        ranks=2,
        before=trained(),
        codes=[4, 2],
    )
    yield Fault(
        "resumed on another model",
        "model_name_or_path",
        {"max_steps": 4, **AUTO},
        codes=[2],
        before=lambda folder: (trained()(folder), other_model(folder)),
    )
    yield Fault(
        "a checkpoint of the future",
        "COMPLETE.json",
        {"max_steps": 4, **AUTO},
        codes=[4],
        before=lambda folder: (
            trained()(folder),
            (folder / "out/checkpoint-2/COMPLETE.json").write_text(json.dumps({"schema": 9, "shards": []})),
        ),
    )
    yield Fault("a second training", "another training is writing", {**LONG, **AUTO}, codes=[2], before=held_folder)
    # Signals -----------------------------------------------------------------------------------------------------
    interrupted = {"codes": [130], "shell": ALONE}
    yield Fault(
        "Ctrl-C at the start",
        "interrupted",
        LONG,
        during=lambda run, folder: (time.sleep(2.5), os.kill(run.running[0], signal.SIGINT)),
        **interrupted,
    )
    yield Fault(
        "Ctrl-C while weights are read", "interrupted", LONG, during=then(loading, signal.SIGINT), **interrupted
    )
    yield Fault(
        "Ctrl-C in a step", "interrupted after step", LONG, during=then(first_step, signal.SIGINT), **interrupted
    )
    yield Fault(
        "Ctrl-C twice",
        "interrupted",
        LONG,
        during=then(first_step, signal.SIGINT, signal.SIGINT, pause=0.05),
        **interrupted,
    )
    yield Fault(
        "Ctrl-C thrice",
        "interrupted",
        LONG,
        during=then(first_step, signal.SIGINT, signal.SIGINT, signal.SIGINT, pause=0.002),
        **interrupted,
    )
    yield Fault(
        "Ctrl-C in a save",
        "interrupted after step",
        {"save_steps": 1, "max_steps": 50},
        during=then(in_save, signal.SIGINT),
        **interrupted,
    )
    yield Fault(
        "Ctrl-C with workers",
        "interrupted after step",
        {**LONG, "dataloader_num_workers": 2},
        during=lambda run, folder: (first_step(run, folder), os.killpg(run.running[0], signal.SIGINT)),
        **interrupted,
    )
    yield Fault(
        "SIGTERM in a step",
        "stopped by SIGTERM after saving",
        LONG,
        during=then(first_step, signal.SIGTERM),
        codes=[143],
        shell=ALONE,
    )
    yield Fault(
        "SIGTERM twice",
        "stopped by SIGTERM after saving",
        LONG,
        during=then(first_step, signal.SIGTERM, signal.SIGTERM, pause=0.01),
        codes=[143],
        shell=ALONE,
    )
    yield Fault(
        "SIGTERM at the start",
        None,
        LONG,
        during=lambda run, folder: (time.sleep(2.5), os.kill(run.running[0], signal.SIGTERM)),
        codes=[-15],
        shell=ALONE,
    )
    yield Fault(
        "SIGTERM to torchrun",
        "stopped by SIGTERM after saving",
        LONG,
        during=then(first_step, signal.SIGTERM),
        codes=[1],
        shell=TORCHRUN,
    )
    yield Fault(
        "one rank killed under torchrun", "lost another process", LONG, during=kill_rank, codes=[1], shell=TORCHRUN
    )
    yield Fault(
        "torchrun killed", "stopped by SIGTERM after saving", LONG, during=kill_launcher, codes=[-9], shell=TORCHRUN
    )


def on_disk(name: str, then: str = "true", size: str = "1g") -> str:
    """Return the command line of a run that has a disk of a few bytes at the folder `name`."""
    mount = f"mkdir -p {name} && mount -t tmpfs -o size={size} none {name}"
    return f"exec unshare -rm bash -c '{mount} && {{ {then}; }} && PYTHON TRAIN WORDS'"


def zero(stage: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((ROOT / "zero2.json").read_text())
        content["zero_optimization"] = {"stage": stage}
        (folder / f"zero{stage}.json").write_text(json.dumps(content))

    return write


def large_images(folder: Path) -> None:
    from PIL import Image

    for path in (folder / "data").glob("*.png"):
        Image.new("RGB", (1600, 1200)).save(path)


def other_model(folder: Path) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def held_folder(folder: Path) -> None:
    import fcntl

    (folder / "out").mkdir()
    lock = open(folder / "out/.training.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept_open.append(lock)


def ranks_of(run: Any) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{run.running[0]}/task/{run.running[0]}/children").read_text().split()]


def kill_rank(run: Any, folder: Path) -> None:
    first_step(run, folder)
    os.kill(ranks_of(run)[-1], signal.SIGKILL)


def kill_launcher(run: Any, folder: Path) -> None:
    first_step(run, folder)
    ranks = ranks_of(run)
    os.kill(run.running[0], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            run.log.write_text(run.text() + f"\nrank {pid} outlived torchrun\n")


class ShellRun(Run):
    """A command line, in a group of processes of its own."""

    def __init__(self, command: str, line: list[str], log: Path, folder: Path, environment: dict[str, str]):
        words = " ".join(f"'{word}'" for word in line)
        command = command.replace("PYTHON", sys.executable).replace("TRAIN", str(ROOT / "train_rm.py"))
        self.log, self.codes = log, []
        process = subprocess.Popen(
            ["bash", "-c", command.replace("WORDS", words)],
            cwd=folder,
            env=os.environ | environment,
            stdout=open(log, "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.returncode = 0  # reaped by `reap`
        self.running = [process.pid]


def play(fault: Fault, folder: Path) -> tuple[bool, list[int], str]:
    """Play a fault in a folder with `model` and `data`; return whether it ended as it must, codes and last line."""
    log = folder / "run.log"
    if fault.before is not None:
        fault.before(folder)
    filled = {
        key: value.replace("HERE", str(folder)) if isinstance(value, str) else value
        for key, value in fault.keys.items()
    }
    environment = {key: value.replace("HERE", str(folder)) for key, value in fault.environment.items()}
    line = short_training(folder / "model", folder / "data/pairs.jsonl", folder / "out", **{"max_steps": 3, **filled})
    if fault.shell is not None:
        run: Any = ShellRun(fault.shell, line, log, folder, environment)
    else:
        run = Run(
            fault.ranks, line, log, environment=environment, inside=lambda: fault.inside and fault.inside(folder)
        )
    if fault.during is not None:
        fault.during(run, folder)
    run.wait(fault.seconds)
    hung = bool(run.running) and not any(run.codes)
    run.end()
    text = run.text()
    without_torchrun = re.sub(
        r"Traceback \(most recent call last\):(?:\n .*)*\n(?:torch.distributed.elastic|.*SignalException).*", "", text
    )
    sentences = [
        message for message in text.splitlines() if re.match(r"(\[rank\d\]:)?\s*(error: |interrupted)", message)
    ]
    right = not hung and "Traceback (most recent" not in without_torchrun and "outlived torchrun" not in text
    if fault.sentence is None:
        right &= all(code in (fault.codes or [0]) for code in run.codes)
    else:
        right &= (
            bool(sentences)
            and any(fault.sentence in message for message in sentences)
            and all(code in fault.codes or code in (0, 5, -9) for code in run.codes)
            and any(run.codes)
        )
    return right, run.codes, "HUNG" if hung else (sentences or text.strip().splitlines() or [""])[-1]


def main(part: str, folder: Path) -> int:
    """Play all faults whose name holds `part`; return how many ended otherwise than they must."""
    from vlmrm.modeling.tiny import make_tiny

    folder.chmod(0o755)
    os.waitpid(fork(lambda: make_tiny(folder / "model"), folder / "model.log"), 0)
    colour_pairs(folder / "data", 8)
    wrong = 0
    for number, fault in enumerate(faults()):
        if part not in fault.name:
            continue
        here = folder / f"fault-{number}"
        here.mkdir()
        here.chmod(0o777)
        for name in ("model", "data"):
            shutil.copytree(folder / name, here / name)
        os.chdir(here)
        began = time.monotonic()
        right, codes, last = play(fault, here)
        wrong += not right
        seconds, mark = time.monotonic() - began, "ok   " if right else "WRONG"
        say(f"{mark} {fault.name:45} {codes!s:10} {seconds:5.1f} s  {last[:170]}")
    return wrong


if __name__ == "__main__":
    preload()
    kept = Path(tempfile.mkdtemp(dir=os.environ.get("LAUNCHES")))
    say(f"logs are in {kept}")
    failed = main(" ".join(sys.argv[1:]), kept)
    raise SystemExit(f"{failed} ended otherwise than they must" if failed else 0)
