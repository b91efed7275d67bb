"""One log file a run under logs/, beside what the terminal shows. Only the first rank writes."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path

logger = logging.getLogger("vlmrm")

FOLDER = Path("logs")


def start_log(kind: str) -> Path | None:
    """Sends the package's messages to the terminal and to `logs/KIND_TIMESTAMP.log`; its path, or None off rank 0."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    rank = int(os.environ.get("RANK", "0"))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(terminal)
    if rank != 0:
        return None
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}.log"
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return path


def quiet_libraries() -> None:
    """Leaves out what libraries print on every run and nobody can act on. Call it before they are imported."""
    # TRL's defaults set the older name, which configurations use too.
    warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    logging.getLogger("stamina").addFilter(_with_cause)
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        # Bars for reading and writing weights and tables would fill a log file.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _with_cause(record: logging.LogRecord) -> bool:
    """A request that is sent again, in words: stamina has them in fields that no terminal shows."""
    fields = vars(record)
    if "stamina.caused_by" in fields:
        cause = re.sub(r"^\w+\((['\"])(.*)\1\)$", r"\2", fields["stamina.caused_by"])  # it is a repr
        record.msg = f"{cause}: asking again in {fields['stamina.wait_for']:g} s"
    return True


def say(text: str) -> None:
    """A line of a command's own output, there before what a process that it starts says."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
