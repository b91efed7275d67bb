"""The command line's help needs none of the heavy libraries, and so is there at once."""

from __future__ import annotations

import subprocess
import sys

HEAVY = "{'torch', 'transformers', 'trl', 'datasets', 'pandas', 'numpy', 'PIL', 'matplotlib'}"


def test_help_imports_nothing_heavy_and_lists_every_verb():
    program = f"""
import sys
from vlmrm import cli
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
        "init-tiny",
        "merge",
        "export",
        "frames",
        "demo",
    ):
        assert f" {verb} " in done.stdout, verb


def test_errors_import_nothing_heavy():
    program = f"import sys, vlmrm, vlmrm.errors; assert not {HEAVY} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
