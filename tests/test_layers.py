"""Imports point down the storeys that pyproject.toml lists, and nowhere in a circle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder", [".", "packages/robots"])
def test_imports_point_down_and_in_no_circle(folder):
    lint_imports = Path(sys.executable).with_name("lint-imports")
    command = [lint_imports, "--no-cache", "--no-logo"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "packages/robots")])
    linted = subprocess.run(
        command, cwd=ROOT / folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
