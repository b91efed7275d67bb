from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_library_logs_a_deprecation() -> None:
    """Let families use what is deprecated in their own library: Video-LLaVA's processor does, and Nemotron-H Omni."""
