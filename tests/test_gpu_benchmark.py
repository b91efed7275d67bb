"""The GPU benchmark: what it does when time or memory ends and when something is wrong; its kernels' references; its
page. Its parts run as the other benchmarks do, in test_benchmarks.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as verb
from benchmarks.gpu import kernels
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import Run
from tests.modeling.test_masks import bottom_right
from vlmrm.modeling import kernels as ours


def part_of(folder: Path, **options) -> Run:
    return Run(**{"name": "part", "budget": 60.0, "scratch": folder, "device": "cpu", "tiny": True, **options}
               | {"results": Results.read(folder, tiny=True)})  # fmt: skip


def test_a_wrong_kernel_fails_while_other_parts_run(tmp_path, monkeypatch, capsys):
    """The planted fault: windows are left out of the plain kernel."""
    right = ours.per_segment
    monkeypatch.setattr(ours, "per_segment", lambda *args: right(*args[:6], None))
    parts = ("kernels", "families", "vllm")
    words = ["--tiny", "--output", tmp_path, *(word for part in parts for word in ("--part", part))]
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, words)])
    monkeypatch.setitem(kernels.CASES, "sdpa", [kernels.WINDOWS[0], kernels.PLAIN[0]])
    monkeypatch.setattr(kernels, "vision", lambda run: None)
    assert verb.main() == 1
    printed = capsys.readouterr()
    assert "failed: kernels: sdpa window 8/2x64: output is off by" in printed.err
    assert "failed: families: gemma3: in torch.float64 it is off by" in printed.err
    assert "vllm is not installed" in printed.out and "sdpa causal 8/2x64" in printed.out
    assert len(Results.read(tmp_path, tiny=True).failures(parts)) == 2


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("case", [kernels.PLAIN[1], kernels.WINDOWS[0]], ids=lambda case: case.name)
def test_the_variable_length_kernel_call_matches_the_reference(case, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(ours, "varlen_attn", bottom_right)
    monkeypatch.setattr(ours, "GROUPS_IF_ASKED", asked)  # torch 2.11 groups heads unasked
    monkeypatch.setattr(kernels, "for_cuda_alone", lambda run, name: None)
    small = replace(case, heads=4, width=16)
    [line] = kernels.equality(part_of(tmp_path), kernels.Rows("cpu", kernels.SMALL[:4]), "row", "varlen", small)
    assert line["holds"] and line["measured"] > 0


def test_tower_attention_matches_the_reference(tmp_path):
    small = kernels.Case(heads=2, key_heads=2, width=16)
    [line] = kernels.tower_equality(part_of(tmp_path), "tower", ours.TORCH, small)
    assert line["holds"] and line["measured"] > 0
