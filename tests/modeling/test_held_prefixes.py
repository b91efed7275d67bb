"""Attention over rows whose conversations begin with prefixes of earlier rows: every kernel, along whole paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from tests.modeling.test_masks import bottom_right
from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.shared import _keep as kept_of
from vlmrm.batching.tree import Tree, grow_after
from vlmrm.modeling import kernels
from vlmrm.modeling.attention import shared_prefix
from vlmrm.modeling.kernels import explicit, flex, per_segment, varlen
from vlmrm.modeling.masks import MaskRule, mask_rule

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
RULES = {"causal": causal_mask_function, "window": and_masks(sliding_window_overlay(3), causal_mask_function)}


@cache
def token_states(path: tuple[int, ...]) -> torch.Tensor:
    """Query, key and value of the last token of a path, [H + 2 KV, D]."""
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(HEADS + 2 * KEY_HEADS, WIDTH, dtype=torch.float64, generator=generator)


def states_of(paths: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Queries, keys and values [1, H, T, D] of the last tokens of paths."""
    return torch.stack(list(map(token_states, paths)), 1)[None].split([HEADS, KEY_HEADS, KEY_HEADS], 1)


class Row:
    """A row of conversations, of which every second prompt was in a row before, unless this is the first."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], *, first: bool = False):
        sequences, cuts, held = [], [], []
        for number, prompt in enumerate(prompts):
            for answer in answers:
                sequences.append(np.array([number, *prompt, *answer]))
                cuts.append(1 + len(prompt))
                held.append(None if first or number % 2 else number)
        self.tree: Tree = grow_after(sequences, cuts, held)
        self.layout = PackedLayout.of(self.tree)
        self.paths: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
        for segment in self.tree.segments:
            path = sequences[segment.sequence].tolist()
            self.paths[segment.held] += [tuple(path[: n + 1]) for n in range(segment.begin, segment.end)]
        query, *own = states_of(self.paths[False])
        if self.paths[True]:
            _, *before = states_of(self.paths[True])
            own = [torch.cat(pair, 2) for pair in zip(before, own, strict=True)]
        self.states = [query, *own]

    def expected(self, name: str) -> torch.Tensor:
        """The output of each token in its own conversation, [1, T, H, D]."""
        outputs = []
        for path in self.paths[False]:
            query, key, value = states_of([path[: n + 1] for n in range(len(path))])
            seen = slice(max(0, len(path) - 3) if name == "window" else 0, None)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, -1:], key[:, :, seen], value[:, :, seen], scale=0.3, enable_gqa=True
                )
            )
        return torch.cat(outputs, 2).transpose(1, 2)

    def rule(self, name: str) -> MaskRule:
        return mask_rule(1, len(self.layout), len(self.layout), mask_function=RULES[name])


words = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@pytest.mark.parametrize("name", RULES)
@given(st.lists(words, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=3))
@settings(max_examples=25)
def test_every_kernel_attends_held_prefixes_like_whole_rows(name, prompts, answers):
    row = Row(prompts, answers)
    assert row.layout.before == sum(1 + len(prompt) for prompt in prompts[::2])
    expected = row.expected(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "varlen_attn", bottom_right)
        outputs = {
            "sdpa": per_segment(*row.states, row.layout, 0.3, 0.0, row.rule(name)),
            "explicit": explicit(*row.states, row.layout, row.rule(name), 0.3, 0.0, None, None),
            "varlen": varlen(*row.states, row.layout, 0.3, row.rule(name)),
        }
    for kernel, output in outputs.items():
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6, msg=kernel)
    torch.testing.assert_close(outputs["sdpa"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", RULES)
def test_flex_attention_masks_the_held_keys_too(name, monkeypatch):
    row = Row([[1, 2, 0, 1], [0, 2], [2]], [[1, 1], [1, 2, 0]])
    monkeypatch.setattr(kernels, "compiled_flex", lambda: flex_attention)
    output = flex(*row.states, row.layout, row.rule(name), 0.3, None, None)
    torch.testing.assert_close(output, row.expected(name), rtol=1e-6, atol=1e-6)


def test_what_one_row_keeps_is_what_another_holds():
    """Through the function that models call; the layers take in the order in which they put."""
    first, second = Row([[1, 2, 0], [9]], [[1], [1, 2]], first=True), Row([[1, 2, 0]], [[2]])
    keep = kept_of(first.layout, first.tree, 0, 4)
    first.layout.keep, second.layout.held = {"prompt": keep}, [keep.kept]
    shared_prefix(torch.nn.Identity(), *first.states, None, 0.3, layout=first.layout)
    row = [states[:, :, -len(second.layout) :] for states in second.states]
    output, _ = shared_prefix(torch.nn.Identity(), *row, None, 0.3, layout=second.layout)
    torch.testing.assert_close(output, second.expected("causal"), rtol=1e-12, atol=1e-12)
    assert {tensor.untyped_storage().nbytes() for tensor in keep.kept.tensors()} == {KEY_HEADS * 4 * WIDTH * 8}
