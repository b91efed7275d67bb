"""State layers over a packed row equal themselves over each conversation alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tests.batching.test_shared import CASES, assert_equal, both
from tests.families.reference import rounding_nowhere
from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.tree import Tree, grow
from vlmrm.errors import ConfigError
from vlmrm.modeling import state
from vlmrm.modeling.state import Forked, fork_states, unknown_state_layers
from vlmrm.modeling.tiny import make_tiny

HEADS, WIDTH = 2, 4


def plain(function):
    """The library's own function, whether or not a model has been forked in this process."""
    return function.plain if isinstance(function, Forked) else function


def delta_rule(generator, tokens, channels=()):
    """Inputs of a gated delta rule over a row."""
    states = [torch.randn(1, tokens, HEADS, WIDTH, generator=generator) for _ in range(3)]
    decay = -torch.rand(1, tokens, HEADS, *channels, generator=generator)
    return [*states, decay, torch.rand(1, tokens, HEADS, generator=generator)]


def gated(function):
    def call(query, key, value, g, beta, **keywords):
        return function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **keywords)[0]

    return call


def token_by_token(function):
    """The recurrence as it is defined, in place of chunks."""

    def call(query, key, value, g, beta):
        return function(query, key, value, g, beta, None, False, True)[0]

    return call


def mamba(generator, tokens):
    """Inputs of Mamba-2 over a row: one group, a state as large as a head, then A, D and the bias of the steps."""
    x = torch.randn(1, tokens, HEADS, WIDTH, generator=generator)
    steps = torch.randn(1, tokens, HEADS, generator=generator)
    B, C = (torch.randn(1, tokens, 1, WIDTH, generator=generator) for _ in range(2))
    return [x, steps, B, C, *(torch.rand(HEADS, generator=generator) for _ in range(3))]


def scanned(function):
    def call(x, steps, B, C, decay, D, bias, **keywords):
        # A least step: padding must not decay the state even so.
        keywords |= {"D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, float("inf"))}
        return function(x, steps, -decay, B, C, chunk_size=16, **keywords)

    return call


def channels(generator, tokens):
    """Inputs of a convolution with four taps, and its weights."""
    return [torch.randn(*shape, generator=generator) for shape in ((1, tokens, 3), (3, 4), (3,))]


def convolved(function):
    def call(x, weight, bias, **keywords):
        return function(x.transpose(1, 2), weight, bias, activation="silu", **keywords).transpose(1, 2)

    return call


# The function over a row, another or the same over a conversation, their inputs, and how many of these are of tokens.
RULE, KIMI = plain(qwen3_5.torch_chunk_gated_delta_rule), plain(glm5_next.chunk_kimi_delta_attention)
SCAN, CONVOLUTION = plain(nemotron_h.mamba2_chunk_scan), plain(qwen3_5.causal_conv1d_fn)
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": (
        gated(Forked("torch_chunk_gated_delta_rule", RULE)),
        token_by_token(qwen3_5.torch_recurrent_gated_delta_rule),
        delta_rule,
        5,
    ),
    "chunk_kimi_delta_attention": (
        gated(Forked("chunk_kimi_delta_attention", KIMI)),
        token_by_token(glm5_next.recurrent_kimi_delta_attention),
        lambda generator, tokens: delta_rule(generator, tokens, (WIDTH,)),
        5,
    ),
    "mamba2_chunk_scan": (scanned(Forked("mamba2_chunk_scan", SCAN)), scanned(SCAN), mamba, 4),
    "causal_conv1d_fn": (convolved(Forked("causal_conv1d_fn", CONVOLUTION)), convolved(CONVOLUTION), channels, 1),
}
token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5)


def rows_of(tree: Tree, layout: PackedLayout, end: int) -> torch.Tensor:
    """The places in the row of a conversation's tokens."""
    return torch.cat([torch.arange(layout.segments[i].start, layout.segments[i].stop) for i in tree.path(end)])


def assert_function_forks(name, tree):
    over_row, alone, inputs, of_tokens = FUNCTIONS[name]
    layout = PackedLayout.of(tree)
    with rounding_nowhere():
        values = [x.double().requires_grad_() for x in inputs(torch.Generator().manual_seed(0), len(layout))]
        output = over_row(*values, layout=layout)
        paths = [rows_of(tree, layout, end) for end in tree.ends]
        expected = [alone(*[x[:, path] for x in values[:of_tokens]], *values[of_tokens:]) for path in paths]
        for path, reference in zip(paths, expected, strict=True):
            torch.testing.assert_close(output[:, path], reference, rtol=1e-11, atol=1e-11)
        losses = [sum((x.sin()).sum() for x in xs) for xs in ([output[:, path] for path in paths], expected)]
        gradients = [torch.autograd.grad(loss, values, retain_graph=True) for loss in losses]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(token_lists)
@settings(max_examples=15)
def test_functions_fork_where_the_tree_does(name, lists):
    assert_function_forks(name, grow([np.array(values) for values in lists]))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("most", [4, 256])
def test_functions_fork_after_several_chunks(name, most, monkeypatch):
    """And with the segments of a depth in one call or in several."""
    monkeypatch.setattr(state, "MAX_PADDING", most)
    prompt, other = list(range(70)), list(range(100, 133))
    sequences = [[*prompt, 1], prompt + [2] * 67, prompt + [2] * 67 + [3, 4], prompt + [2] * 67 + [5], other, [7, 7]]
    assert_function_forks(name, grow([np.array(values) for values in sequences]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3.5 whose state layers remember: at first their states decay within a few tokens."""
    folder = make_tiny(tmp_path_factory.mktemp("qwen3_5") / "tiny", arch="qwen3_5")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(-6, -1, len(weight)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_shared_batch_equals_the_padded_one(checkpoint, name):
    assert_equal(both(checkpoint, CASES[name], dtype=torch.float64), 1e-10)


@pytest.mark.parametrize("lost", [state.tree_convolution, state.tree_delta_rule])
def test_each_function_must_fork(checkpoint, monkeypatch, lost):
    name = next(name for name, tree in state.TREES.items() if tree is lost)
    monkeypatch.setitem(state.TREES, name, lambda plain, layout, *args, **keywords: plain(*args, **keywords))
    (scores, _), (unforked, _) = both(checkpoint, CASES["irrelevant branches"], dtype=torch.float64)
    assert (scores - unforked).abs().max() > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputation_under_checkpointing_forks_too(checkpoint, reentrant):
    def checkpointing(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    case = CASES["irrelevant branches"]
    results = both(checkpoint, case, checkpointing, dtype=torch.float64)
    assert_equal(results, 1e-10)
    kept = both(checkpoint, case, dtype=torch.float64)[1]
    torch.testing.assert_close(results[1][0], kept[0], rtol=1e-12, atol=1e-12)
    for name, gradient in results[1][1].items():
        if "language_model" in name:
            torch.testing.assert_close(gradient, kept[1][name], rtol=1e-9, atol=1e-11)


def test_with_lora_on_a_state_layer(checkpoint):
    from peft import get_peft_model

    from vlmrm.modeling import ModelArguments, lora_config

    def adapted(model):
        torch.manual_seed(3)
        model = get_peft_model(model, lora_config(ModelArguments(use_peft=True), model))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)  # zeros, as they start, would leave the other half without gradients
        return model.double()

    results = both(checkpoint, CASES["irrelevant branches"], adapted, dtype=torch.float64)
    assert_equal(results, 1e-10)
    assert any("linear_attn" in name and "lora" in name for name in results[1][1])


def test_bfloat16_errors_match_those_of_padded_batches(checkpoint):
    case = CASES["irrelevant branches"]
    exact = both(checkpoint, case)[0][0]
    padded, shared = (scores for scores, _ in both(checkpoint, case, dtype=torch.bfloat16))
    assert (shared - exact).abs().max() <= 3 * (padded - exact).abs().max() + 1e-3


TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "num_local_experts": 2, "num_experts": 2},
}


@pytest.mark.parametrize(
    ("model_type", "name"), [("jamba", "JambaMambaMixer"), ("minimax", "MiniMaxDecoderLayer (linear_attention)")]
)
def test_state_layers_that_are_not_known_are_named(model_type, name):
    config = AutoConfig.for_model(model_type, **TEXT)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert name in unknown_state_layers(model)
    with pytest.raises(ConfigError, match=r"does not know the state layers .*: write batching: reference"):
        fork_states(model)
