"""The benchmarks: what they count and compare, and that each of them runs. Their timings are not judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import BENCHMARKS, flops
from benchmarks.contest import Contest
from benchmarks.shapes import Pair, candidates, configuration, training
from tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("VLMRM_TEST_DATA", ROOT.parent / "shared" / "data"))


PACKAGES = ("bitsandbytes", "flash_attn", "flash_attn_interface", "vllm")
NOT_HERE = {"runs on CUDA alone", *(f"{package} is not installed" for package in PACKAGES)}


# As `python -m` does, in a process with torch and vlmrm imported; those that it starts have them too.
RUN = """
import multiprocessing, runpy, sys
if not sys.flags.dont_write_bytecode:  # else Python starts them with an option that ours does not know
    multiprocessing.set_executable(sys.executable)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    alone = words[0] in ("benchmarks.serving", "benchmarks.soak", "benchmarks.vision")  # which look at their processes
    command = [sys.executable, "-m", *words] if alone else [preloaded.python(), "-c", RUN, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", [*BENCHMARKS, "soak"])
def test_each_prints_one_object_of_finite_rows(name, tmp_path):
    options = []
    if name == "flickr8k":
        if not (DATA / "flickr8k_pref").is_dir():
            pytest.skip("no flickr8k_pref under VLMRM_TEST_DATA")
        options = ["--data", str(DATA / "flickr8k_pref")]
    if name == "gpu":  # without its service, which that of `serving` is
        parts = ("kernels", "families", "steps_3b", "lengths", "profile", "noise", "training", "offline", "vllm")
        options = [word for part in parts for word in ("--part", part)]
        options += ["--output", str(tmp_path), "--scratch", str(tmp_path / "scratch")]
    result = run(f"benchmarks.{name}", "--quick", "--json", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["benchmark"] == name
    assert {"cpu", "cores", "date"} <= report["machine"].keys()
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert report["rows"]
    for row in report["rows"]:
        if row.get("status"):  # why there is no figure
            assert row["measured"] is None and row["status"] in NOT_HERE
            continue
        assert row["case"] and row["unit"] and math.isfinite(row["measured"])
        assert row["holds"] is None  # a smoke run says nothing about targets


def test_a_benchmark_that_cannot_run_here_says_why():
    result = run("benchmarks.flickr8k", "--data", "nowhere")
    assert result.returncode == 0, result.stderr
    assert "skipped: nowhere has no vl_expert_train.jsonl" in result.stdout


PAIRS = [Pair(16, 8, 5, 9), Pair(16, 6, 7, 3)]


def test_both_ways_give_one_score_for_each_conversation():
    config = configuration("tiny")
    contest = Contest(config, training(config, PAIRS))  # it refuses unequal scores
    scores = contest.our_scores(contest.our_inputs())
    assert len(scores) == 6
    assert len(scores.unique()) == 6
    contest.naive.value_head = torch.nn.Linear(config.text_config.hidden_size, 1)
    with pytest.raises(AssertionError, match="nothing to compare"):
        contest.compare(1e-4)


def test_a_step_of_either_way_leaves_equal_gradients():
    config = configuration("tiny")
    contest = Contest(config, training(config, PAIRS))
    gradients = {}
    for name, prepare in contest.steps().items():
        prepare()()
        gradients[name] = {n: p.grad.clone() for n, p in contest.model.named_parameters()}
    for name, gradient in gradients["ours"].items():
        torch.testing.assert_close(gradients["naive"][name], gradient, rtol=1e-4, atol=1e-6)


def counted(function, *inputs) -> int:
    """Operations as torch counts them: matrix products and convolutions, without attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*inputs)
    attention = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    return counter.get_total_flops() - attention


@pytest.mark.parametrize("size", ["tiny", "windows_tiny", "state_tiny"])
@pytest.mark.parametrize("work", ["training", "candidates"])
def test_operations_are_those_that_torch_counts(work, size, monkeypatch):
    config = configuration(size, 16)
    made = training(config, PAIRS) if work == "training" else candidates(config, 5, 16, 8, 4)
    contest = Contest(config, made)
    # Attention's share depends on the kernel; torch's counter knows only some of them, and no triangular solves.
    monkeypatch.setattr(flops, "delta_rule", partial(flops.delta_rule, solves=False))
    padded = flops.of_padded(config, made.conversations, attention=False)
    shared = flops.of_shared(config, contest.our_inputs(), attention=False)
    # A convolution of a state layer also computes a few tokens before each of its rows.
    most = 0.02 if size == "state_tiny" else 0.01
    assert counted(contest.naive_scores, contest.naive_inputs()) == pytest.approx(padded.forward, rel=most)
    assert counted(contest.our_scores, contest.our_inputs()) == pytest.approx(shared.forward, rel=most)
