"""Fixtures of every test of frames."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def messages(tmp_path, monkeypatch):
    """They reach `caplog`, whichever command ran before; a command's log is written into the test's folder."""
    monkeypatch.setattr(logging.getLogger("vlmrm"), "propagate", True)
    monkeypatch.setattr("vlmrm.logs.FOLDER", tmp_path / "logs")
