"""Run the tests at two speeds: `--cheap` takes those of little work, and `--workers` forks after collection.

tests/durations.txt lists the items of over half a CPU second, with the seconds, children counted; they are `slow`.
`python -m pytest --durations-file tests/durations.txt --workers 2` writes it anew.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import preloaded

HERE = Path(__file__).resolve().parent
LISTED = HERE / "durations.txt"
SLOW = 0.5  # CPU seconds of an item, above which it is in the list
GUARD = 1.0  # an item that is not in it may take no more: machines differ
ALL_CHEAP = 420.0  # CPU seconds of a run of the cheap ones
CHUNK = 20.0  # a file's items go to one worker, unless they take longer


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vlmrm")
    group.addoption("--cheap", action="store_true", help="leave out slow items, unless they are smoke tests")
    group.addoption("--rest", action="store_true", help="run what --cheap leaves out")
    group.addoption("--workers", type=int, default=1, help="processes, forked after collection")
    group.addoption("--guard", action="store_true", help="fail where an item that is not slow takes a CPU second")
    group.addoption("--durations-file", help="write the items that are slow here")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TwoSpeeds(config), "two speeds")


@dataclass(eq=False)  # a plugin is a key
class TwoSpeeds:
    """Marks items by their cost, runs them in forked workers, and says what was left out."""

    config: pytest.Config
    seconds: dict[str, float] = field(default_factory=dict)  # by item, without fixtures that others share
    shared: dict[str, float] = field(default_factory=dict)  # by such a fixture
    left_out: int = 0
    inner: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self.listed = listed()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid in self.listed:
                item.add_marker("slow")
        option = self.config.option
        if option.cheap or option.rest:
            taken = [is_cheap(item) == option.cheap for item in items]
            self.left_out = taken.count(False) if option.cheap else 0
            items[:] = itertools.compress(items, taken)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        start = cpu_seconds()
        self.inner.append(0.0)
        try:
            return (yield)
        finally:
            spent = cpu_seconds() - start
            own = spent - self.inner.pop()
            self.inner[-1] += spent
            self.shared[f"{request.node.nodeid}::{fixturedef.argname}"] = own

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        start = cpu_seconds()
        self.inner[:] = [0.0]
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = cpu_seconds() - start - self.inner[0]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        option = self.config.option
        if option.workers < 2 or option.collectonly or len(session.items) < 2 or session.testsfailed:
            preloaded.start()
            return None
        session.config._tmp_path_factory.getbasetemp()  # made here, it is one for all workers
        alone = [item for item in session.items if item.get_closest_marker("alone")]
        self.run(session, [item for item in session.items if item not in alone], option.workers)
        for _, of_a_file in itertools.groupby(alone, key=lambda item: item.path):
            self.run(session, [*of_a_file], 1)
        return True

    def run(self, session: pytest.Session, items: list[pytest.Item], count: int) -> None:
        """Run items in so many workers."""
        chunks = list(self.chunks(items))
        numbers, feed = os.pipe()
        os.write(feed, b"".join(number.to_bytes(4, "little") for number in range(len(chunks))))
        os.close(feed)
        with selectors.DefaultSelector() as selector:
            workers = [Worker(session, chunks, numbers, selector) for _ in range(count)]
            try:
                while any(worker.pid for worker in workers):
                    for key, _ in selector.select():
                        key.data.read(self)
                        if session.shouldfail or session.shouldstop:
                            raise session.Failed(session.shouldfail or session.shouldstop)
            finally:
                for worker in workers:
                    worker.end(kill=True)

    def chunks(self, items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
        """Yield the items of a file at a time, or less where they take long; the longest first."""
        chunks = []
        for _, group in itertools.groupby(items, key=lambda item: item.path):
            chunk, seconds = [], 0.0
            for item in group:
                cost = self.listed.get(item.nodeid, 0.05)
                if chunk and seconds + cost > CHUNK:
                    chunks.append((seconds, chunk))
                    chunk, seconds = [], 0.0
                chunk.append(item)
                seconds += cost
            chunks.append((seconds, chunk))
        yield from (chunk for _, chunk in sorted(chunks, key=lambda it: -it[0]))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name what failed at once; the reasons come at the end."""
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and not isinstance(terminal, Reports):
            terminal.write_line(f" {report.nodeid}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            ran = len(self.seconds)
            terminalreporter.write_line(
                f"{ran:,} of {ran + self.left_out:,} tests ran; the others need more: make test-all"
            )
        for line in self.faults():
            terminalreporter.write_line(line, red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if name := self.config.option.durations_file:
            write(Path(name), self.costs(session.items))
        if session.exitstatus == 0 and any(self.faults()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def costs(self, items: list[pytest.Item]) -> dict[str, float]:
        """Return CPU seconds by item, each with its share of the fixtures that others use too."""
        shares = {item.nodeid: [name for name in users(item) if name in self.shared] for item in items}
        count = Counter(itertools.chain.from_iterable(shares.values()))
        return {
            item: seconds + sum(self.shared[name] / count[name] for name in shares[item])
            for item, seconds in self.seconds.items()
        }

    def faults(self) -> Iterator[str]:
        """Yield what `--guard` refuses."""
        if not self.config.option.guard:
            return
        for item, seconds in self.seconds.items():
            if seconds > GUARD and item not in self.listed:
                yield f"{item} took {seconds:.1f} CPU seconds: make it cheaper, or list it in tests/durations.txt"
        total = sum(self.seconds.values()) + sum(self.shared.values())
        if self.config.option.cheap and total > ALL_CHEAP:
            yield f"the cheap tests took {total:.0f} CPU seconds together, over {ALL_CHEAP:.0f}"


class Worker:
    """A forked process that runs chunks of items, and the pipe of its reports."""

    def __init__(self, session: pytest.Session, chunks: list[list[pytest.Item]], numbers: int, selector: Any):
        self.session, self.chunks, self.numbers, self.selector = session, chunks, numbers, selector
        self.start([])

    def start(self, left: list[pytest.Item]) -> None:
        """Fork the process, which begins with what is left of a chunk."""
        self.running, self.buffer = "", b""
        self.output, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.output)
            code = 1
            try:
                run_chunks(self.session, left, self.chunks, self.numbers, write_end)
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        self.selector.register(self.output, selectors.EVENT_READ, self)

    def read(self, run: TwoSpeeds) -> None:
        """Take what the worker sent; where it died, its item fails, and another goes on."""
        data = os.read(self.output, 1 << 20)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        hook = self.session.config.hook
        for line in lines:
            kind, *what = json.loads(line)
            if kind == "start":
                [self.running] = what
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=self.session.config, data=what[0])
                if isinstance(report.longrepr, list):  # JSON knows no tuples, and a skip has one
                    report.longrepr = tuple(report.longrepr)
                hook.pytest_runtest_logreport(report=report)
            elif kind == "costs":
                run.seconds |= what[0]
                run.shared |= what[1]
                self.running = ""
        if not data:
            died = self.end()
            if self.running:
                words = f"the process of this test ended with {died}"
                report = pytest.TestReport(self.running, (self.running, None, ""), {}, "failed", words, "call")
                hook.pytest_runtest_logreport(report=report)
                [chunk] = [it for it in self.chunks if any(item.nodeid == self.running for item in it)]
                names = [item.nodeid for item in chunk]
                self.start(chunk[names.index(self.running) + 1 :])

    def end(self, *, kill: bool = False) -> int:
        """Wait for the process, and return the code that it ended with."""
        if not self.pid:
            return 0
        self.selector.unregister(self.output)
        os.close(self.output)
        pid, self.pid = self.pid, 0
        if kill:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_chunks(
    session: pytest.Session, left: list[pytest.Item], chunks: list[list[pytest.Item]], numbers: int, output: int
) -> None:
    """Run what is left of one chunk, then chunks until there are none, and send the reports."""
    preloaded.start()
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    for stream in (capture._global_capturing.out, capture._global_capturing.err):
        if stream is not None:  # what is open stays open, as libraries have it, and is a file of this process
            with tempfile.TemporaryFile() as own:
                os.dup2(own.fileno(), stream.tmpfile.fileno())
    capture.suspend_global_capture()
    capture.resume_global_capture()
    reports = Reports(config, output, config.pluginmanager.unregister(name="terminalreporter"))
    config.pluginmanager.register(reports, "terminalreporter")
    run = config.pluginmanager.getplugin("two speeds")
    elsewhere = SimpleNamespace(listchain=lambda: [session])  # what is set up for all outlives a file
    given = iter(lambda: os.read(numbers, 4), b"")
    for chunk in itertools.chain([left], (chunks[int.from_bytes(number, "little")] for number in given)):
        for item, following in itertools.pairwise([*chunk, elsewhere]):
            reports.send("start", item.nodeid)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            reports.send("costs", run.seconds, run.shared)
            run.seconds, run.shared = {}, {}
    session._setupstate.teardown_exact(None)


class Reports:
    """Sends reports to the parent, in the place of `terminal`, whose colours pytest asks for."""

    def __init__(self, config: pytest.Config, output: int, terminal: Any):
        self.config, self.output, self._tw = config, output, terminal._tw

    def send(self, *message: Any) -> None:
        rest = json.dumps(message).encode() + b"\n"
        while rest:
            rest = rest[os.write(self.output, rest) :]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def is_cheap(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is None or item.get_closest_marker("smoke") is not None


def users(item: pytest.Item) -> Iterator[str]:
    """Yield the names under which fixtures that this item may use are counted."""
    for name, node in itertools.product(getattr(item, "fixturenames", ()), item.listchain()):
        yield f"{node.nodeid}::{name}"


def cpu_seconds() -> float:
    """Return those of this process and of its children that have ended."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + preloaded.cpu_seconds()


def listed() -> dict[str, float]:
    """Return the items that are slow, with their CPU seconds."""
    lines = LISTED.read_text(encoding="utf-8").splitlines() if LISTED.exists() else []
    return {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def write(path: Path, costs: dict[str, float]) -> None:
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(costs.items()) if seconds > SLOW]
    path.write_text("".join(lines), encoding="utf-8")
