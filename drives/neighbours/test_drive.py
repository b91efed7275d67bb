"""A driver that ends early, or never, leaves what it proved and no process, and says why the rest is not proved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import drive
import pytest
from environments import Neighbour

CASE = dict.fromkeys(("url", "model", "away", "policy", "broken", "folder"), "") | {"pictures": []}
DRIVER = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from checks import main


def stops(case):
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open(os.path.join(case.folder, "..", "beside"), "w").write(str(beside.pid))
    os._exit(3)


main({{"first": lambda case: "done", "second": stops, "third": lambda case: "done"}})
"""


class Made(Neighbour):
    """A framework whose environment is that of the tests."""

    python = property(lambda self: Path(sys.executable))  # ty: ignore[invalid-attribute-override]
    driver = property(lambda self: drive.FOLDER / "driver.py")  # ty: ignore[invalid-attribute-override]


def driven(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(drive, "FOLDER", folder)
    (folder / "driver.py").write_text(code)
    (folder / "case.json").write_text(json.dumps(CASE))
    return drive.drive(Made("made", "Made", ("made",)), folder / "case.json", **options)["checks"]


def runs(number: str) -> bool:
    """Say whether a process has not ended; one that its parent has not heard of yet has."""
    try:
        return Path("/proc", number, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_early_ending_driver_leaves_proofs_without_processes(tmp_path, monkeypatch):
    checks = driven(tmp_path, monkeypatch, DRIVER)
    assert checks["first"] == {"proved": True, "what": "done"}
    for name in ("second", "third"):
        assert not checks[name]["proved"] and "its driver ended with status 3" in checks[name]["what"]
    assert not runs((tmp_path / "beside").read_text())


def test_a_hanging_driver_is_ended_and_reported(tmp_path, monkeypatch):
    checks = driven(tmp_path, monkeypatch, "import time; time.sleep(600)", limit=1)
    assert checks == {"equal": {"proved": False, "ended": True, "what": "its driver was ended after 1 s"}}
