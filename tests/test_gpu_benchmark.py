"""The GPU benchmark: what it does when time or memory ends and when something is wrong; its kernels' references; its
page. Its parts run as the other benchmarks do, in test_benchmarks.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from benchmarks.gpu import __main__ as verb
from benchmarks.gpu import kernels
from benchmarks.gpu.models import real_configuration
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import ContextLost, Run
from benchmarks.harness import Skipped, row
from tests.test_benchmarks import DATA
from vlmrm.modeling import kernels as ours
from vlmrm.modeling import kernels as vlmrm_kernels


def part_of(folder: Path, **options) -> Run:
    return Run(**{"name": "part", "budget": 60.0, "scratch": folder, "device": "cpu", "tiny": True, **options}
               | {"results": Results.read(folder, tiny=True)})  # fmt: skip


def one(case: str, measured: float = 1.0):
    return lambda: [row(case, measured, "x")]


def raising(error: BaseException):
    def measure():
        raise error

    return measure


def statuses(run: Run) -> dict[str, str | None]:
    return {line["case"]: line.get("status") for line in Results.read(run.scratch, tiny=True).part("part").report()}


def test_what_goes_wrong_in_a_case_is_a_row_and_the_next_case_runs(tmp_path):
    run = part_of(tmp_path)
    run.attempt("full", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")))
    run.attempt("unequal", raising(kernels.Unequal("off by 0.5 of its size")))
    run.attempt("absent", raising(Skipped("vllm is not installed")))
    run.attempt("broken", raising(ValueError("no such thing\nat all")))
    run.attempt("good", one("good"))
    assert statuses(run) == {
        "full": "out of memory",
        "unequal": "off by 0.5 of its size",
        "absent": "vllm is not installed",
        "broken": "ValueError: no such thing",
        "good": None,
    }
    failed = [line.split(": ")[1] for line in run.results.failures(["part"])]
    assert failed == ["unequal", "broken"], "memory that ends, and packages that are not there, are no faults"


def test_what_the_budget_cuts_is_measured_by_the_next_run_and_nothing_else_is(tmp_path):
    run = part_of(tmp_path)
    run.attempt("first", one("first"))
    run.attempt("absent", raising(Skipped("vllm is not installed")))
    late = part_of(tmp_path, budget=0.0)
    for case in ("first", "second"):
        late.attempt(case, raising(AssertionError("ran without time")))
    assert statuses(run)["second"] == "cut at 0 s" and statuses(run)["first"] is None
    assert not late.results.part("part").complete
    again = part_of(tmp_path)
    again.attempt("first", raising(AssertionError("measured twice")))
    again.attempt("absent", one("absent"))
    again.attempt("second", one("second"))
    assert statuses(run) == dict.fromkeys(("first", "absent", "second"))
    assert again.results.part("part").complete


def test_a_gpu_that_is_lost_ends_the_process_after_the_row(tmp_path):
    with pytest.raises(ContextLost):
        part_of(tmp_path).attempt("bad", raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert "illegal memory access" in statuses(part_of(tmp_path))["bad"]


def test_a_wrong_kernel_fails_the_verb_and_the_other_parts_run(tmp_path, monkeypatch, capsys):
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


def documented_varlen(query, key, value, cu_queries, cu_keys, *longest, scale, window_size, enable_gqa):
    """What torch documents: queries and keys [N, H, D] of sequences side by side, aligned to the bottom right."""
    lengths = (cu_queries, cu_keys, cu_keys)
    pieces = [states.split(cu.diff().tolist()) for states, cu in zip((query, key, value), lengths, strict=True)]
    outputs = []
    for q, k, v in zip(*pieces, strict=True):
        back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        mask = (back >= -window_size[1]) & ((back <= window_size[0]) | (window_size[0] < 0))
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(2), v))
    return torch.cat(outputs)


def varlen_of_torch_2_11(*states, scale, window_size):
    """Groups heads unasked."""
    return documented_varlen(*states, scale=scale, window_size=window_size, enable_gqa=True)


@pytest.mark.parametrize("function", [documented_varlen, varlen_of_torch_2_11])
@pytest.mark.parametrize("case", [kernels.PLAIN[1], kernels.WINDOWS[0]], ids=lambda case: case.name)
def test_the_call_of_the_variable_length_kernel_is_that_of_the_reference(case, function, monkeypatch, tmp_path):
    monkeypatch.setattr(vlmrm_kernels, "varlen_attn", function)
    monkeypatch.setattr(kernels, "for_cuda_alone", lambda run, name: None)
    small = replace(case, heads=4, width=16)
    [line] = kernels.equality(part_of(tmp_path), kernels.Rows("cpu", kernels.SMALL[:4]), "row", "varlen", small)
    assert line["holds"] and line["measured"] > 0


def test_the_attention_of_towers_is_that_of_the_reference(tmp_path):
    small = kernels.Case(heads=2, key_heads=2, width=16)
    [line] = kernels.tower_equality(part_of(tmp_path), "tower", vlmrm_kernels.TORCH, small)
    assert line["holds"] and line["measured"] > 0


def test_the_real_sizes_are_those_of_the_published_configurations():
    for size, name in (("3b", "qwen2.5-vl-3b-config"), ("7b", "qwen2.5-vl-7b-processor")):
        if not (DATA / name / "config.json").is_file():
            pytest.skip(f"no {name} under VLMRM_TEST_DATA")
        published, made = AutoConfig.from_pretrained(DATA / name), real_configuration(size)
        ignored = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "in_chans"}
        ignored |= {"spatial_patch_size", "rope_parameters", "max_window_layers"}
        for part in ("text_config", "vision_config"):
            ours_of, theirs = (getattr(config, part).to_dict() for config in (made, published))
            assert {key: ours_of[key] for key in theirs.keys() - ignored} == {
                key: theirs[key] for key in theirs.keys() - ignored
            }
        assert made.tie_word_embeddings == published.tie_word_embeddings
        rope = made.text_config.rope_parameters
        assert rope["mrope_section"] == published.text_config.rope_parameters["mrope_section"]
        assert rope["rope_theta"] == published.text_config.rope_parameters["rope_theta"]


def test_a_process_that_dies_leaves_its_case_as_a_row(tmp_path):
    run = part_of(tmp_path)
    run.results.tiny = False
    run.results.part("part").running = "the case"
    run.results.save()
    assert verb.blame("part", "its process ended with -11", tmp_path, failed=True)
    results = Results.read(tmp_path)
    assert results.failures(["part"]) == ["part: the case: its process ended with -11"]
    assert results.part("part").holds("the case"), "it is not tried again"
    assert not verb.blame("part", "its process ended with 1", tmp_path, failed=True), "before any case"
