"""Log to the terminal and, on rank 0, to a file per run under logs/; report the progress of long passes."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO, TypeVar

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

FOLDER = Path("logs")
LINE_SECONDS = 30.0  # between two lines of a long pass
BAR_SECONDS = 1.0  # a shorter pass has no bar


def start_log(kind: str) -> Path | None:
    """Log to the terminal and to `logs/KIND_TIMESTAMP.log`; return that path, or None on ranks other than 0."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    rank = int(os.environ.get("RANK", "0"))
    terminal = _Terminal(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(terminal)
    if rank != 0:
        return None
    path = FOLDER / f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}.log"
    try:
        FOLDER.mkdir(exist_ok=True)
        file = _File(path, encoding="utf-8")
    except OSError as error:
        logger.warning("There is no log file: %s", error)
        return None
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return path


class _File(logging.FileHandler):
    """A handler that says once that it cannot write; Python's own would write a traceback for every line.

    It also never raises: who logs is not to end where the disk is full or the folder of the log is gone.
    """

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it again, after another library has closed every handler of the process
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            sys.stderr.write(f"{self.baseFilename} cannot be written any more: {sys.exc_info()[1]}\n")


class _Terminal(logging.StreamHandler):
    """A handler that writes above the progress bars of a terminal, not into them.

    Of a record with `in_terminal` (in `extra`) it writes that, which is short.
    """

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self._may_have_bars = stream.isatty()

    def format(self, record: logging.LogRecord) -> str:
        return getattr(record, "in_terminal", None) or super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._may_have_bars or "tqdm" not in sys.modules:
            return super().emit(record)
        from tqdm import tqdm

        tqdm.write(self.format(record), file=self.stream)


class Pace:
    """How far a pass of `total` rows or steps has come, `since` of them before it, and how long the rest will take."""

    def __init__(self, total: int | None, since: int = 0):
        self._total, self._since = total, since
        self._started = self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether `LINE_SECONDS` have passed since the start, or since it last returned True."""
        now = time.monotonic()
        if now - self._last < LINE_SECONDS:
            return False
        self._last = now
        return True

    def position(self, done: int) -> str:
        """Return for instance `50/700 (7 %, 3 min left)`."""
        if not self._total:
            return f"{done:,}"
        left = ""
        if self._since < done < self._total:
            seconds = (time.monotonic() - self._started) / (done - self._since) * (self._total - done)
            left = f", {duration(round(seconds))} left"
        return f"{done:,}/{self._total:,} ({100 * done // self._total} %{left})"


def duration(seconds: float) -> str:
    """Return seconds as a reader wants them: `42 s`, `12 min`, `3 h 5 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.3g} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: int, noun: str) -> str:
    """Return `1 row`, `1,204 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def progress(rows: Iterable[T], title: str, total: int | None = None, *, show: bool = True) -> Iterator[T]:
    """Yield the rows of a pass; in a terminal a bar shows how far it is, elsewhere a line every `LINE_SECONDS`."""
    if not show:
        yield from rows
    elif sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(rows, title, total, unit="row", leave=False, delay=BAR_SECONDS)
    else:
        pace = Pace(total)
        for done, row in enumerate(rows):
            if pace.is_due():
                line = f"{title}: {pace.position(done)}"
                logger.info(line) if logger.handlers else sys.stderr.write(line + "\n")
            yield row


def quiet_libraries() -> None:
    """Silence messages of libraries that come on every run and need no action. Call it before importing them."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        # Progress bars for weights and tables would fill a log file.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def say(text: str) -> None:
    """Print a line of a command's output; flushed, so that it precedes the output of a process started next."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
