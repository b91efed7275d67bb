"""A success is what settings declare it to be, and a declaration that means nothing is refused with what there is."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrm.errors import ConfigError
from vlmrm_robots.frames.environments import success_test

STEP = (
    {"agent": np.array([0.5, 2.0]), "door": {"angle": 1.2}},
    np.float32(0.7),
    True,
    False,
    {"is_success": np.float32(1), "metrics": {"coverage": 0.93}},
)


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("info.is_success", True),
        ("terminated", True),
        ("reward >= 0.75", False),
        ("info.metrics.coverage > 0.9", True),
        ("observation.agent.1 <= 2", True),
        ("observation.door.angle < 1", False),
        ("operator_like:truly", True),
    ],
)
def test_a_declaration_says_what_a_step_was(declaration, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the user's own module, beside the configuration
    source = "def truly(observation, reward, terminated, truncated, info):\n    return terminated and reward < 1\n"
    (tmp_path / "operator_like.py").write_text(source)
    assert success_test(declaration)(*STEP) is expected


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("info.is_sucess", "there is no is_sucess: choose from is_success, metrics"),
        ("info.metrics.coverag > 1", "no coverag: choose from coverage"),
        ("observation.agent > 1", r"that is \[2\] values: name one of them"),
        ("observation.agent.2 > 1", r"there is no 2: choose from an array of \[2\]"),
        ("reward", "write info.KEY, terminated, reward >= NUMBER"),
        ("reward > much", "write info.KEY"),
        ("is_success", "write info.KEY"),
        ("no_such_module_here:f", "there is no module no_such_module_here"),
        ("json:dumpss", r"json has no function dumpss: did you mean dumps\?"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(declaration, message):
    with pytest.raises(ConfigError, match=message):
        success_test(declaration)(*STEP)
