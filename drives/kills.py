"""Kills trainings at random moments and starts them again: python drives/kills.py --kills 100

Each training goes on, with `--resume_from_checkpoint auto` and nothing else, until it ends; then its weights must
equal those of an uninterrupted one byte for byte. Processes are forked from this one, which has imported everything,
so that a start takes a second. The last lines say where the kills came.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from tests.preloaded import preload
from tests.runs import colour_lists, short_training
from vlmrm import cli
from vlmrm.logs import say

KEYS = {"max_steps": 8, "save_steps": 2, "save_total_limit": 2, "resume_from_checkpoint": "auto"}
KEYS["lr_scheduler_type"] = "constant_with_warmup"  # a step too many would change weights
DOUBLE_STARTS = 0.2  # share of the starts beside which a second one is made
SAVE_SECONDS = 0.1  # about as long as a save takes
SAVES = ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8", "final")
COUNTED = ("trainings", "equal bytes", "human steps", "tracebacks", "starts", "begun anew", "set aside",
           "double starts", "double starts refused", "ranks that outlived another",
           "tracebacks of orphaned workers")  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A training to be killed: its name, its keys and its processes."""

    name: str
    keys: dict[str, Any]
    ranks: int = 1


KINDS = (
    Kind("full", {"gradient_accumulation_steps": 2, "use_irrelevant_queries": True}),
    Kind("LoRA", {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1}),
    Kind("worker and evaluation", {"dataloader_num_workers": 1, "eval_fraction": 0.3, "eval_strategy": "steps",
                                   "eval_steps": 2, "probe_samples": 2}),
    Kind("two ranks", {}, ranks=2),
)  # fmt: skip


@dataclass
class Figures:
    """What happened: kills by place, and everything that should not."""

    places: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.places.total()

    def lines(self) -> Iterable[str]:
        yield f"{self.kills} kills: " + ", ".join(f"{count} {place}" for place, count in self.places.most_common())
        yield ", ".join(f"{count} {name}" for name, count in self.counts.items())
        yield from self.wrong

    def succeeded(self) -> bool:
        return not (self.wrong or self.counts["human steps"] or self.counts["tracebacks"])


def fork(run: Callable[[], Any], log: Path, **environment: Any) -> int:
    """Run the function in a process of its own, its output in `log`, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.environ |= {name: str(value) for name, value in environment.items()}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        run()
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def wait_for_no_lock() -> None:
    from vlmrm.training import folder

    folder.LOCK_SECONDS = 0.0


class Run:
    """The processes of one start of a training, with their output in one file."""

    def __init__(
        self,
        ranks: int,
        line: list[str],
        log: Path,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        inside: Callable[[], Any] = lambda: None,
    ):
        def train() -> None:
            inside()
            cli.run(lambda: cli.app(["train", *line], exit_on_error=False))

        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1], "WORLD_SIZE": ranks}
        environments = [{}] if ranks == 1 else [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        self.running = [fork(train, log, **environment, **variables) for variables in environments]
        self.codes: list[int] = []

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def refused(self) -> bool:
        return "another training is writing into" in self.text()

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all processes have ended or one has failed, and return whether it is so, or `until` is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self.reap()
            if not self.running or any(self.codes):
                return True
            time.sleep(0.001)
        return False

    def reap(self) -> None:
        for pid in list(self.running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.running.remove(pid)
                self.codes.append(os.waitstatus_to_exitcode(status))

    def kill(self) -> None:
        """Kill all processes, or one of them and let the others find out, as torchrun does."""
        for pid in self.running if random.random() < 0.5 else [random.choice(self.running)]:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for processes whose neighbour has ended, and end them after a while."""
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            for pid in self.running:
                os.kill(pid, number)
            deadline = time.monotonic() + 10.0
            while self.running and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.01)


def in_a_save(output: Path, names: Sequence[str] = ("checkpoint-*", "final")) -> bool:
    """Return whether one of these checkpoints is half written now."""
    return any(not (path / "COMPLETE.json").exists() for name in names for path in output.glob(name))


def place(output: Path, log: str) -> str:
    """Return where a kill came, by what the run left."""
    folders = list(output.glob("checkpoint-*"))
    if (output / "final/COMPLETE.json").exists():
        return "after the end"
    if (output / "final").exists():
        return "saving the result"
    if list(output.glob(".*.deleted")):
        return "deleting a checkpoint"
    if in_a_save(output):
        return "in a save" if any((path / "COMPLETE.json").exists() for path in folders) else "in the first save"
    if "Training " not in log:
        return "starting again" if folders else "starting, with nothing saved"
    return "between saves" if folders else "before the first save"


def digest(output: Path) -> str:
    weights = sorted((output / "final").glob("*.safetensors"))
    return (
        sha256(b"".join(path.read_bytes() for path in weights)).hexdigest() if weights else f"{output} has no weights"
    )


@dataclass
class Episode:
    """One training, from an empty folder through kills to its end."""

    kind: Kind
    line: list[str]
    output: Path
    life: float  # seconds that it takes without a kill
    figures: Figures

    def train(self, kills: int, in_saves: float) -> bool:
        """Start it again until it ends; return whether it ended well. `in_saves` of the kills wait for a save."""
        for number in itertools.count(1):
            run = Run(self.kind.ranks, self.line, self.output.with_suffix(f".{number}.log"))
            kill = kills > 0
            moment = random.uniform(0, self.life) if kill else 600.0
            if random.random() < DOUBLE_STARTS:
                run.wait(random.uniform(0, min(moment, self.life)))
                self.start_twice(number)
            if kill and random.random() < in_saves:
                target = random.choice(SAVES)
                run.wait(60.0, until=lambda target=target: in_a_save(self.output, [target]))
                moment = random.uniform(0, SAVE_SECONDS)
            if not run.wait(moment) and kill:
                run.kill()
                self.figures.places[place(self.output, run.text())] += 1
                kills -= 1
                run.wait(60.0)
                self.figures.counts["ranks that outlived another"] += len(run.running)
            run.end()
            self.count(run.text())
            if not any(run.codes):
                return True
            if -signal.SIGKILL not in run.codes and not run.refused():
                self.figures.wrong.append(f"{self.kind.name}: it ended with {run.codes} without a kill: {run.log}")
                return False
        raise AssertionError

    def start_twice(self, number: int) -> None:
        """Start the training a second time; it must be refused while the first one lives."""
        log = self.output.with_suffix(f".{number}.second.log")
        second = Run(self.kind.ranks, self.line, log, inside=wait_for_no_lock)
        second.wait(600.0)
        self.figures.counts["double starts"] += 1
        self.figures.counts["double starts refused"] += second.refused()
        self.count(second.text())
        if any(second.codes) and not second.refused():
            self.figures.wrong.append(f"{self.kind.name}: a second start ended with {second.codes}: {log}")

    def count(self, text: str) -> None:
        orphaned = text.count("resource_sharer.py")  # Python's own words in a worker whose training was killed
        self.figures.counts["starts"] += 1
        self.figures.counts["tracebacks"] += text.count("Traceback (most recent") - orphaned
        self.figures.counts["tracebacks of orphaned workers"] += orphaned
        self.figures.counts["set aside"] += text.count("; it is now incomplete-")
        self.figures.counts["begun anew"] += "No complete checkpoint in" in text


def main(kills: int, folder: Path, seed: int, in_saves: float, kinds: Sequence[Kind] = KINDS) -> Figures:
    """Kill trainings of every kind `kills` times in all, and return what happened."""
    from vlmrm.modeling.tiny import make_tiny

    random.seed(seed)
    figures = Figures()
    os.chdir(folder)
    os.waitpid(fork(lambda: make_tiny(folder / "model"), folder / "model.log"), 0)
    data = colour_lists(folder / "data", 12)
    for number, kind in enumerate(kinds):
        whole = folder / f"whole-{number}"
        began = time.monotonic()
        run = Run(
            kind.ranks, short_training(folder / "model", data, whole, **KEYS, **kind.keys), whole.with_suffix(".log")
        )
        assert run.wait(600.0) and not any(run.codes), run.text()
        life = time.monotonic() - began
        for episode in itertools.count(1):
            left = kills * (number + 1) // len(kinds) - figures.kills
            if left <= 0:
                break
            output = folder / f"killed-{number}-{episode}"
            line = short_training(folder / "model", data, output, **KEYS, **kind.keys)
            ended = Episode(kind, line, output, life, figures).train(left, in_saves)
            figures.counts["trainings"] += 1
            figures.counts["human steps"] += not ended
            figures.counts["equal bytes"] += ended and digest(output) == digest(whole)
            if ended and digest(output) != digest(whole):
                figures.wrong.append(f"{kind.name}: {output} differs from {whole}")
        say(f"{kind.name}: {life:.1f} s without a kill; {figures.kills} kills so far")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--in_saves", type=float, default=0.0, help="share of the kills that wait for a save")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[k.name for k in KINDS])
    parser.add_argument("--folder", type=Path, help="on a fast disk; default: a temporary one that is deleted")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        outcome = main(
            arguments.kills,
            arguments.folder or Path(temporary),
            arguments.seed,
            in_saves=arguments.in_saves,
            kinds=[kind for kind in KINDS if kind.name in arguments.kinds],
        )
    for text in outcome.lines():
        say(text)
    raise SystemExit(not outcome.succeeded())
