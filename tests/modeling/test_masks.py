"""Attention over packed rows under the families' masks equals that of each conversation alone.

The references are transformers' own: `sdpa_mask` evaluates a family's mask function for one conversation, and the
eager attention of Gemma 2 and gpt-oss computes soft caps and sinks.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from transformers import MistralConfig
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.tree import grow
from vlmrm.errors import ConfigError
from vlmrm.modeling import kernels, masks
from vlmrm.modeling.attention import SHARED_PREFIX, shared_prefix
from vlmrm.modeling.kernels import block_mask, dense, flex
from vlmrm.modeling.masks import mask_rule

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")

# Mask functions as the families compose them, of the tokens' kinds [1, T]: 1 is an image's.
RULES = {
    "causal": lambda kinds: causal_mask_function,
    "window": lambda kinds: sliding_window_causal_mask_function(5),
    "chunks": lambda kinds: chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    "images": lambda kinds: or_masks(causal_mask_function, images(kinds)),
    "images in a window": lambda kinds: and_masks(
        or_masks(causal_mask_function, images(kinds)), sliding_window_overlay(4)
    ),
    "images beyond a window": lambda kinds: or_masks(sliding_window_causal_mask_function(3), images(kinds)),
}


def images(kinds: torch.Tensor):
    return blockwise_overlay(get_block_sequence_ids_for_mask(kinds))


class Row:
    """A packed row of conversations, each a sequence of words (0 to 2) and images (10 and 11, of 3 and 4 tokens)."""

    def __init__(self, conversations: list[list[int]], seed: int):
        tokens = []
        for conversation in conversations:
            # A word after each image, so that no two are one run.
            items = [[-item] * (item - 7) + [3] if item >= 10 else [item] for item in conversation]
            tokens.append(np.concatenate([[4], *items]).astype(int))
        tree = grow(tokens)
        self.layout = PackedLayout.of(tree)
        self.tokens = np.concatenate([tokens[s.sequence][s.begin : s.end] for s in tree.segments])
        segments = self.layout.segments
        self.paths = [
            np.concatenate([np.arange(segments[i].start, segments[i].stop) for i in tree.path(end)])
            for end in set(tree.ends)
        ]
        generator = torch.Generator().manual_seed(seed)
        self.states = [
            torch.randn(1, heads, len(self.tokens), WIDTH, dtype=torch.float64, generator=generator)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]

    def kinds(self, rows=slice(None)) -> torch.Tensor:
        return torch.as_tensor((self.tokens[rows] < 0).astype(int))[None]

    def rule(self, name: str):
        length = len(self.tokens)
        return mask_rule(1, length, length, mask_function=RULES[name](self.kinds()))

    def expected(self, name: str, attention, **keywords) -> torch.Tensor:
        """The output for the row, [1, T, H, D], from each conversation alone."""
        output = torch.full((1, len(self.tokens), HEADS, WIDTH), torch.nan, dtype=torch.float64)
        for path in self.paths:
            function, length = RULES[name](self.kinds(path)), len(path)
            mask = sdpa_mask(1, length, length, mask_function=function, allow_is_causal_skip=False)
            added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
            states = [state[:, :, path] for state in self.states]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "float32", torch.float64)  # to which the softmax is rounded
                alone = attention(module(**keywords), *states, added, scaling=0.3, **keywords)[0]
            torch.testing.assert_close(output[:, path].nan_to_num(nan=0.0), alone * ~output[:, path].isnan())
            output[:, path] = alone
        return output


def module(s_aux=None, **ignored):
    """What the library's eager attention reads of the layer."""
    return SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, training=False, sinks=s_aux)


def attend(row: Row, rule, **keywords) -> torch.Tensor:
    return shared_prefix(torch.nn.Identity(), *row.states, rule, 0.3, layout=row.layout, **keywords)[0]


conversations = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 10, 11]), min_size=0, max_size=6).map(lambda tail: [0, 10, 1, 1, *tail]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", RULES)
@given(conversations, st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_each_conversation_has_its_attention_alone(name, lists, seed):
    row = Row(lists, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "QUERIES", 3)
        output = attend(row, row.rule(name))
    torch.testing.assert_close(output, row.expected(name, gemma2_attention), rtol=1e-12, atol=1e-12)


BRANCHES = [[0, 10, 1, 1, 2, 2], [0, 10, 1, 1, 11, 0, 0], [0, 10, 1, 1, 2, 0, 1, 1, 1], [2, 10, 1]]


@pytest.mark.parametrize("keywords", [{"softcap": 0.7}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize("name", ["causal", "window", "images"])
def test_soft_caps_and_sinks_match_the_library(name, keywords):
    row = Row(BRANCHES, seed=0)
    assert len(row.tokens) < sum(map(len, row.paths))
    expected = row.expected(name, gpt_oss_attention if "s_aux" in keywords else gemma2_attention, **keywords)
    torch.testing.assert_close(attend(row, row.rule(name), **keywords), expected, rtol=1e-12, atol=1e-12)
    assert (attend(row, row.rule(name)) - expected).abs().max() > 1e-3, "they change the output"


@pytest.mark.parametrize("name", [name for name in RULES if name != "causal"])
def test_without_the_rule_the_output_is_another(name):
    row = Row(BRANCHES, seed=0)
    assert (attend(row, None) - row.expected(name, gemma2_attention)).abs().max() > 1e-2


def test_sink_and_state_gradients_match_the_library():
    row = Row(BRANCHES, seed=0)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    leaves = [sinks, *(state.requires_grad_() for state in row.states)]
    gradients = [
        torch.autograd.grad(output.square().sum(), leaves)
        for output in (
            attend(row, row.rule("window"), s_aux=sinks),
            row.expected("window", gpt_oss_attention, s_aux=sinks),
        )
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


# What is refused.


def test_prefix_tokens_attending_to_later_tokens_are_refused():
    """All images of a conversation are one block in Molmo 2, and the whole prompt is in PaliGemma."""
    row = Row(BRANCHES, seed=0)
    blocks = torch.where(row.kinds() == 1, 0, -1)
    rule = mask_rule(
        1, blocks.shape[1], blocks.shape[1], mask_function=or_masks(causal_mask_function, blockwise_overlay(blocks))
    )
    with pytest.raises(ConfigError, match="cannot divide a prefix whose tokens attend to tokens after it"):
        attend(row, rule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": None, "position_ids": torch.tensor([[0, 1, 2, 1, 2, 3]])}, "an attention_mask of ones"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "padding in its attention_mask"),
        ({"attention_mask": torch.ones(2, 6, dtype=torch.long)}, "not over 2 rows of 6 queries"),
        ({"allow_is_causal_skip": False}, "an index of its own keys"),
    ],
)
def test_what_is_no_packed_row_is_refused(arguments, message):
    """By the mask that a family's forward makes, which asks the library."""
    config = MistralConfig(hidden_size=8, sliding_window=4, attn_implementation=SHARED_PREFIX)
    arguments = {"attention_mask": torch.ones(1, 6, dtype=torch.long), "past_key_values": None} | arguments
    rows = 1 if arguments["attention_mask"] is None else len(arguments["attention_mask"])
    with pytest.raises(ConfigError, match=message):
        create_causal_mask(config, torch.zeros(rows, 6, 8), **arguments)


# Kernels. Those of CUDA run in benchmarks/gpu: their masks and arguments are compared here.


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", RULES)
def test_the_flex_mask_is_the_dense_one(name, monkeypatch):
    """Without a compiler, and forward alone: it has no backward on a CPU."""
    row = Row(BRANCHES, seed=0)
    rule = row.rule(name)
    mask = block_mask(row.layout, rule, CPU)
    every = torch.arange(len(row.layout))
    assert torch.equal(mask.mask_mod(0, 0, every[:, None], every), dense(row.layout, rule, CPU))
    assert dense(row.layout, rule, CPU).sum() < len(row.layout) ** 2 / 2
    monkeypatch.setattr(kernels, "compiled_flex", lambda: flex_attention)
    output = flex(*row.states, row.layout, rule, 0.3, 0.7, None)
    torch.testing.assert_close(output, row.expected(name, gemma2_attention, softcap=0.7), rtol=1e-6, atol=1e-6)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = flex(*row.states, row.layout, rule, 0.3, None, sinks)
    torch.testing.assert_close(output, row.expected(name, gpt_oss_attention, s_aux=sinks), rtol=1e-6, atol=1e-6)


def bottom_right(query, key, value, cu_queries, cu_keys, *longest, scale, window_size, enable_gqa=True):
    """What torch documents of `varlen_attn`: queries [N, H, D] see `window_size` keys to the left and right."""
    outputs = []
    for i in range(len(cu_queries) - 1):
        q, k, v = (
            states[cu[i] : cu[i + 1]].transpose(0, 1)
            for states, cu in ((query, cu_queries), (key, cu_keys), (value, cu_keys))
        )
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        left, right = window_size
        mask = ((distance >= -right) | (right < 0)) & ((distance <= left) | (left < 0))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(outputs)
