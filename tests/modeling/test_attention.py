"""The attention that a configuration names is used where it can run; elsewhere the next is, and one line says so."""

from __future__ import annotations

import logging

import pytest
import torch

from vlmrm.errors import ConfigError
from vlmrm.modeling import attention, resolve_attention


@pytest.fixture
def machine(monkeypatch):
    def has(gpu: bool = True, two: bool = False, three: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: two)
        monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: three)

    attention.log_once.cache_clear()
    return has


TWO, THREE = "flash_attention_2", "flash_attention_3"


@pytest.mark.parametrize(
    ("machine_has", "name", "kernel", "line"),
    [
        ({"gpu": False}, "auto", "sdpa", "sdpa, because there is no CUDA GPU"),
        ({"gpu": False}, TWO, "sdpa", "sdpa instead of flash_attention_2, because there is no CUDA GPU"),
        ({}, "auto", "sdpa", "sdpa, because flash-attn is not installed: pip install -e '.[flash]'"),
        ({}, TWO, "sdpa", "sdpa instead of flash_attention_2, because flash-attn is not installed: pip install"),
        ({"two": True}, THREE, TWO, "flash_attention_2 instead of flash_attention_3, because flash-attn-3 is not"),
        ({"three": True}, TWO, "sdpa", "sdpa instead of flash_attention_2, because flash-attn is not installed"),
        ({"two": True}, "auto", TWO, None),
        ({"two": True, "three": True}, "auto", THREE, None),
        ({"two": True, "three": True}, TWO, TWO, None),
        ({"two": True, "three": True}, "sdpa", "sdpa", None),
    ],
)
def test_attention_names_resolve_to_the_next_available_kernel(machine, caplog, machine_has, name, kernel, line):
    machine(**machine_has)
    with caplog.at_level(logging.WARNING, "vlmrm"):
        assert resolve_attention(name) == resolve_attention(name) == kernel
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (line is not None), "one line a process"
    assert all(text.startswith(f"attn_implementation: {line}") for text in lines)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ConfigError, match="'eager'"):
        resolve_attention("eager")
