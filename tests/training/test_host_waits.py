"""A training's micro-batch waits for the device once, and its tower takes few operations; the library's do not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.vision import HOST_WAITS, VISION_OPS, micro_batch
from vlmrm.modeling import families

SIDE = 280  # pixels: 9 windows of three sizes; neither count of ours depends on it


@pytest.fixture
def counts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(families.BY_MODEL_TYPE, "qwen2_5_vl", families.BY_MODEL_TYPE["qwen2_5_vl"])
    return micro_batch


def test_operations_and_host_waits_of_a_micro_batch(counts):
    threads = torch.get_num_threads()
    ours, library = counts("ours", SIDE), counts("library", SIDE)
    assert ours.operators <= VISION_OPS
    assert sum(ours.waits.values()) <= HOST_WAITS, ours.waits
    assert library.operators > VISION_OPS and sum(library.waits.values()) > 10 * HOST_WAITS, "the control"
    assert torch.get_num_threads() == threads
