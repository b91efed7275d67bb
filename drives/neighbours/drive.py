"""Drive other frameworks' own reward paths, each in its environment: `make neighbours`, or `drive.py NAME...`.

A tiny reward model is served by `vlmrm serve`; every framework must come to the rewards that `load_scorer` gives, and
`table.py` writes down what was proved.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from checks import NOT_DONE
from environments import FOLDER, Neighbour, make_all, neighbours, size
from PIL import Image

from vlmrm.modeling import make_tiny, make_tiny_reward_model
from vlmrm.scoring import load_scorer

TOLERANCE = 1e-5
LIMIT_S = 1500  # against a driver that hangs: a busy machine must not decide a check
START_S = 900  # until the service is ready
OWNER = "VLMRM_NEIGHBOUR"  # the environment variable that all processes of a driver have


@contextmanager
def served(model: Path) -> Generator[str]:
    """The address of `vlmrm serve` on a free port, once it is ready."""
    command = [sys.executable, "-m", "vlmrm", "serve", "--model", str(model), "--port", "0"]
    log = FOLDER / "service.log"  # a pipe that nobody reads would fill, and stop the service
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            yield ready(process, log)
        finally:
            process.terminate()


def ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a service says that it is ready; return its address."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        seen = log.read_text(encoding="utf-8")
        address = re.search(r"http://127\.0\.0\.1:\d+", seen)
        if address and "is ready" in seen:
            return address[0]
        time.sleep(0.1)
    raise RuntimeError("the service did not start: " + log.read_text(encoding="utf-8")[-600:])


@contextmanager
def nowhere() -> Generator[str]:
    """An address where nothing listens, nor anybody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def written_case(folder: Path, model: Path, url: str, away: str) -> Path:
    """Write what the drivers are given."""
    noise = random.Random(0)
    pictures = [folder / f"picture_{number}.png" for number in range(2)]
    for picture in pictures:
        Image.frombytes("RGB", (84, 56), noise.randbytes(84 * 56 * 3)).save(picture)
    broken = folder / "broken.png"
    broken.write_bytes(pictures[0].read_bytes()[:2000])
    policy = make_tiny(folder / "policy")
    case: dict[str, Any] = {"url": url, "model": str(model), "away": away, "policy": str(policy)}
    case |= {"broken": str(broken), "pictures": [str(one) for one in pictures], "folder": ""}
    file = folder / "case.json"
    file.write_text(json.dumps(case), encoding="utf-8")
    return file


def drive(neighbour: Neighbour, case: Path, limit: float = LIMIT_S) -> dict[str, Any]:
    """Run a framework's driver in its environment; return its report, which says so where it was ended."""
    folder = Path(tempfile.mkdtemp(prefix=f"{neighbour.name}-", dir=case.parent))
    own, report = folder / "case.json", folder / "report.json"
    own.write_text(json.dumps({**json.loads(case.read_text()), "folder": str(folder)}), encoding="utf-8")
    command = [str(neighbour.python), str(neighbour.driver), str(own), str(report)]
    # Its compiled modules are kept: ranks and workers import all of them once more.
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if neighbour.checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(neighbour.checkout / one) for one in neighbour.sources)
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {OWNER: str(folder), "RAY_worker_register_timeout_seconds": str(LIMIT_S)}
    log = FOLDER / f"{neighbour.name}.log"
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            ended = f"its driver ended with status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = f"its driver was ended after {limit:.0f} s"
        finally:
            end_all(str(folder))
            process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if "status" in ended and said:
        ended += f": {said[-1][:300]}"
    checks = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"equal": NOT_DONE}
    for name, check in checks.items():
        if check == NOT_DONE:
            checks[name] = {"proved": False, "ended": True, "what": ended}
    return {"checks": checks, "seconds": round(time.monotonic() - began)}


def end_all(owner: str) -> None:
    """Kill what a driver has left: ranks, and daemons with sessions of their own, as Ray's."""
    deadline = time.monotonic() + 30
    while (left := processes_of(owner)) and time.monotonic() < deadline:  # one of them may have begun another
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.1)


def processes_of(owner: str) -> list[int]:
    """Return the processes that run for a driver, by their environment; Linux tells it of those that run."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{OWNER}={owner}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def compared(what: Any, scorer: Any, pictures: Sequence[str]) -> dict[str, Any]:
    """Compare a framework's rewards with the scorer's own, and that with the scores of other pictures."""
    ran, rows = (f"{what['ran']}, ", what["rows"]) if isinstance(what, dict) else ("", what)
    expected = scorer.score([row["messages"] for row in rows])
    text = json.dumps([row["messages"] for row in rows])
    # A framework that sends texts alone must tell those apart.
    other = scorer.score(json.loads(swapped(text, pictures))) if '"image"' in text else expected[1:] + expected[:1]
    if min(abs(one - two) for one, two in zip(expected, other, strict=True)) < 100 * TOLERANCE:
        return {"proved": False, "what": "the scorer itself hardly tells the samples apart"}
    worst = max(abs(row["reward"] - score) for row, score in zip(rows, expected, strict=True))
    kind = "rewards" if '"image"' in text or '"video"' in text else "rewards of texts"
    return {"proved": worst <= TOLERANCE, "what": f"{ran}{len(rows)} {kind}, at most {worst:.0e} off"}


def swapped(text: str, pictures: Sequence[str]) -> str:
    """Return the JSON of conversations with the pictures of its first half in place of those of its second.

    If they show one of two `pictures` alone, the other is in its place.
    """
    names = list(dict.fromkeys([*re.findall(r'"image": ("[^"]+")', text), *map(json.dumps, pictures)]))
    others = dict(zip(names, names[len(names) // 2 :] + names[: len(names) // 2], strict=True))
    return re.sub(r'(?<="image": )"[^"]+"', lambda match: others[match[0]], text)


def released(neighbour: Neighbour) -> str:
    """The version of the framework that the environment has, or the commit of its checkout."""
    if neighbour.checkout is not None:
        command = ["git", "-C", neighbour.checkout, "rev-parse", "--short=10", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    name = re.split(r"[\[=]", neighbour.requires[0])[0]
    packages = [str(it) for it in neighbour.folder.glob("lib/python*/site-packages")]
    return next(it.version for it in distributions(name=name, path=packages))


def main(names: Sequence[str]) -> int:
    asked = [one for one in neighbours() if one.name in names or (not names and one.is_here)]
    began = time.monotonic()
    unmade = make_all(asked)
    minutes = (time.monotonic() - began) / 60
    results = Results(keep=bool(names))
    for neighbour in asked:
        if reason := unmade[neighbour.name]:
            results.add(neighbour, neighbour.requires[0], {"resolves": {"proved": False, "what": reason}})
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_reward_model(Path(folder, "model"))
        scorer = load_scorer(model, device="cpu", dtype="float32")
        with served(model) as url, nowhere() as away, ThreadPoolExecutor(2) as pool:
            case = written_case(Path(folder), model, url, away)
            pictures = json.loads(case.read_text(encoding="utf-8"))["pictures"]
            driven = {pool.submit(drive, one, case): one for one in asked if unmade[one.name] is None}
            for report in as_completed(driven):
                checks = {"resolves": {"proved": True, "what": ""}, **report.result()["checks"]}
                for name, check in checks.items():
                    if check["proved"] and not isinstance(check["what"], str):
                        checks[name] = compared(check["what"], scorer, pictures)
                neighbour = driven[report]
                results.add(neighbour, released(neighbour), checks, report.result()["seconds"])
    sys.stdout.write(f"environments: {size():.1f} GB, made in {minutes:.1f} min\n")
    return int(results.failed)


class Results:
    """What came of each framework; written as soon as it is known, so that no end of the others loses it."""

    def __init__(self, keep: bool):
        self.file = FOLDER / "results.json"
        self.found = json.loads(self.file.read_text(encoding="utf-8")) if keep and self.file.exists() else {}
        self.failed = False

    def add(self, neighbour: Neighbour, version: str, checks: dict[str, Any], seconds: int = 0) -> None:
        result = {"title": neighbour.title, "version": version, "date": datetime.now(UTC).date().isoformat()}
        self.found[neighbour.name] = {**result, "seconds": seconds, "checks": checks}
        ordered = {one.name: self.found[one.name] for one in neighbours() if one.name in self.found}
        self.file.write_text(json.dumps(ordered, indent=1), encoding="utf-8")
        for name, check in checks.items():
            verdict = "proved" if check["proved"] else "NOT PROVED"
            self.failed |= not check["proved"] and (name not in neighbour.known or "ended" in check)
            sys.stdout.write(f"{neighbour.title} {version}: {name}: {verdict}: {check['what']}\n")
        sys.stdout.write(f"{neighbour.title}: {seconds} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
