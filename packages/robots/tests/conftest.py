"""Fixtures of every test of frames."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _log_folder(tmp_path, monkeypatch):
    """A command's log is written into the test's folder."""
    monkeypatch.setattr("vlmrm.logs.FOLDER", tmp_path / "logs")
