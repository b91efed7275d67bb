"""Two ranks get the rewards and advantages that one process gets, and fail together."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import preloaded
from vlmrm.rewards import RewardSet

HERE = Path(__file__).parent


def test_two_ranks_equal_one():
    launch = [preloaded.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*launch, str(HERE / "two_ranks.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    prompts = ["aaa", "x", "a", "solo", "yyy", "aa", "zz", "bbbb"]
    groups = [7, 8, 7, "one", 8, 7, 8, 9]
    alone = RewardSet(
        [
            {"name": "rank", "reward_model": "tests.rewards.reward_examples.Rank"},
            {"name": "threads", "reward_model": "tests.rewards.reward_examples.Rank"},
            {"name": "length", "reward_model": "tests.rewards.reward_examples.Length"},
        ]
    )(prompt=prompts, groups=groups)
    for name, values in alone.rewards.items():
        assert first[name] + second[name] == values.tolist()
    np.testing.assert_allclose(first["advantages"] + second["advantages"], alone.advantages("sum"), rtol=1e-12)
    metrics = {name: value for name, value in alone.metrics().items() if "seconds" not in name}
    assert first["metrics"] == second["metrics"] == pytest.approx(metrics, nan_ok=True)
    assert metrics["rewards/length/group_std"] > 0
    assert first["error"] == "rank 1: reward judge: the judge cannot be reached"
    assert second["error"] == "reward judge: the judge cannot be reached"
    # The mean of the samples of its prompt on both ranks; and for ms-swift, whose None is 0, that of all.
    assert first["trl"] == pytest.approx([-3.0, -4.0, None]) and second["trl"] == [-5.0, -1.0, -2.0]
    assert first["swift"] == pytest.approx([-3.0, -4.0, -2.75]) and second["swift"] == [-5.0, -1.0, -2.0]
