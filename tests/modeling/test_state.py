"""State layers over a packed row equal themselves over each conversation alone."""

from __future__ import annotations

import sys
from functools import wraps

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tests.batching.test_shared import CASES, assert_equal, both, rounding_nowhere
from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.tree import Tree, grow
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import load_for_training, state
from vlmrm.modeling.attention import SHARED_PREFIX, batcher_for
from vlmrm.modeling.state import Forked, fork_states, unknown_state_layers
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rendering import Renderer

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


def state_layers(model):
    return [module for module in model.modules() if state._is_known(type(module))]


def counting(seen, prepare=lambda model: model):
    """Prepare a model as `both` does; `seen` gets tokens and layout of each call of its first state layer."""

    def count(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append((hidden.shape[0] * hidden.shape[1], kwargs.get("layout")))

    def prepared(model):
        model = prepare(model)
        state_layers(model)[0].register_forward_pre_hook(count, with_kwargs=True)
        return model

    return prepared


@pytest.fixture
def calls(monkeypatch):
    """The shapes of queries in each call of the delta rule under Qwen3.5's state layers."""
    shapes = []

    @wraps(RULE)
    def counted(query, *args, **keywords):
        shapes.append(tuple(query.shape[:2]))
        return RULE(query, *args, **keywords)

    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", counted)
    return shapes


@pytest.mark.parametrize("name", CASES)
def test_a_shared_batch_of_qwen3_5_equals_the_padded_one(checkpoint, name, calls):
    seen = []
    assert_equal(both(checkpoint, CASES[name], counting(seen), dtype=torch.float64), 1e-10)
    (padded, _), (shared, layout) = seen
    assert shared < padded
    levels = 1 + max(segment.depth for segment in layout.segments)
    assert levels > 1
    assert len(calls) == 3 * (1 + levels), "one call a level in each of three layers"


def test_without_the_fork_scores_differ(checkpoint, monkeypatch):
    """The control: as if the row were one conversation."""
    monkeypatch.setattr(Forked, "__call__", lambda self, *args, layout=None, **keywords: self.plain(*args, **keywords))
    (scores, _), (unforked, _) = both(checkpoint, CASES["irrelevant branches"], dtype=torch.float64)
    assert (scores - unforked).abs().max() > 0.01


@pytest.mark.parametrize("lost", [state.tree_convolution, state.tree_delta_rule])
def test_each_function_must_fork(checkpoint, monkeypatch, lost):
    name = next(name for name, tree in state.TREES.items() if tree is lost)
    monkeypatch.setitem(state.TREES, name, lambda plain, layout, *args, **keywords: plain(*args, **keywords))
    (scores, _), (unforked, _) = both(checkpoint, CASES["irrelevant branches"], dtype=torch.float64)
    assert (scores - unforked).abs().max() > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputation_under_checkpointing_forks_too(checkpoint, reentrant, calls):
    def checkpointing(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    case = CASES["irrelevant branches"]
    results = both(checkpoint, case, checkpointing, dtype=torch.float64)
    assert_equal(results, 1e-10)
    forwards = len(calls)
    kept = both(checkpoint, case, dtype=torch.float64)[1]
    assert forwards == 2 * (len(calls) - forwards), "each call was made again"
    torch.testing.assert_close(results[1][0], kept[0], rtol=1e-12, atol=1e-12)
    for gradient_name, gradient in results[1][1].items():
        if "language_model" in gradient_name:
            torch.testing.assert_close(gradient, kept[1][gradient_name], rtol=1e-9, atol=1e-11)


def test_two_batches_may_be_recomputed_after_both(checkpoint):
    """Each from its own layout."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = load_for_training(checkpoint, dtype=torch.float32, attn_implementation="sdpa", seed=1).train()
    batcher = batcher_for(model, processor, "shared")
    cases = [CASES["irrelevant branches"], CASES["turns"]]
    batches = [batcher([Renderer(processor).render(read_conversation(c), {}) for c in case]) for case in cases]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for together in (False, True):
        model.zero_grad()
        if together:
            torch.cat([model(**batch).logits for batch in batches]).sin().sum().backward()
        else:
            for batch in batches:
                model(**batch).logits.sin().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4)


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

    seen = []
    results = both(checkpoint, CASES["irrelevant branches"], counting(seen, adapted), dtype=torch.float64)
    assert_equal(results, 1e-10)
    assert seen[1][0] < seen[0][0]
    assert any("linear_attn" in name and "lora" in name for name in results[1][1])


def test_in_bfloat16_the_error_is_of_the_same_order(checkpoint):
    case = CASES["irrelevant branches"]
    exact = both(checkpoint, case)[0][0]
    padded, shared = (scores for scores, _ in both(checkpoint, case, dtype=torch.bfloat16))
    assert (shared - exact).abs().max() <= 3 * (padded - exact).abs().max() + 1e-3


# Other language models, with every kind of state layer that multimodal families have.


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHORT = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
LANGUAGE_MODELS = {
    "qwen3_5_moe_text": {
        **DELTA,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0]},
    },
    "lfm2": SHORT,
    "lfm3": SHORT,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        "layer_types": DELTA["layer_types"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
}


def language_model(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TEXT | LANGUAGE_MODELS.get(model_type, {}))
    model = AutoModel.from_config(config, attn_implementation="sdpa", experts_implementation="eager").double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
def test_a_language_model_over_a_row_equals_itself_over_each_conversation(model_type):
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11] * 3
    sequences = [prompt, [*prompt, 12, 13, 14, 15], [*prompt, 12, 13, 17], [*prompt, 20], [*prompt[:3], 30], [40, 41]]
    tree = grow([np.array(values) for values in sequences])
    layout = PackedLayout.of(tree)
    assert len(layout) < sum(map(len, sequences)) / 2
    row = torch.tensor([[token for s in tree.segments for token in sequences[s.sequence][s.begin : s.end]]])
    ends = [layout.segments[end].stop - 1 for end in tree.ends]
    positions = torch.from_numpy(layout.positions())[None]

    def last_states(model, ids, **keywords):
        return model(input_ids=ids, use_cache=False, **keywords).last_hidden_state[0]

    def with_gradients(model, states):
        loss = states.sin().sum()
        names, parameters = zip(*model.named_parameters(), strict=True)
        return states, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    seen = []
    with rounding_nowhere():
        model = counting(seen)(language_model(model_type))
        alone = torch.stack([last_states(model, torch.tensor([values]))[-1] for values in sequences])
        expected, expected_gradients = with_gradients(model, alone)
        model.set_attn_implementation(SHARED_PREFIX)
        assert fork_states(model) == sorted({type(layer).__name__ for layer in state_layers(model)})
        inputs = {"attention_mask": torch.ones_like(row), "position_ids": positions, "layout": layout}
        states, gradients = with_gradients(model, last_states(model, row, **inputs)[ends])
    assert seen[-1] == (len(layout), layout)
    torch.testing.assert_close(states, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() <= 1e-9 * gradient.norm().clamp(min=1e-3), name
    assert (expected - expected.mean(0)).std() > 0.1


# What is not known is refused.


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("jamba", "JambaMambaMixer"), ("minimax", "MiniMaxDecoderLayer (linear_attention)")],
)
def test_state_layers_that_are_not_known_are_named(model_type, name):
    config = AutoConfig.for_model(
        model_type, **TEXT | {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts": 2}
    )
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert name in unknown_state_layers(model)
    with pytest.raises(ConfigError, match=r"does not know the state layers .*: write batching: reference"):
        fork_states(model)


def test_no_state_layers_are_no_trouble():
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("qwen3", **TEXT))
    assert unknown_state_layers(model) == fork_states(model) == []


def test_forking_again_does_nothing_and_padded_batches_stay_as_they_are():
    ids = torch.arange(3, 33).view(2, 15)
    before = language_model("lfm2")(input_ids=ids, use_cache=False).last_hidden_state
    model = language_model("lfm2")
    fork_states(model)
    namespace = sys.modules[type(state_layers(model)[0]).__module__]
    functions, hooks = namespace.causal_conv1d_fn, len(model._forward_pre_hooks)
    fork_states(model)
    assert namespace.causal_conv1d_fn is functions
    assert len(model._forward_pre_hooks) == hooks
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).last_hidden_state, before, rtol=0, atol=0)


def test_a_layer_that_does_not_hand_the_layout_on_is_an_error(monkeypatch):
    model = language_model("lfm2")
    fork_states(model)
    model.set_attn_implementation(SHARED_PREFIX)
    layer_class = type(state_layers(model)[0])
    forward = layer_class.forward
    monkeypatch.setattr(
        layer_class, "forward", lambda self, *args, layout=None, **keywords: forward(self, *args, **keywords)
    )
    ids = torch.arange(3, 9)[None]
    layout = PackedLayout.of(grow([np.arange(6)]))
    with pytest.raises(ConfigError, match=r"cannot reach causal_conv1d_fn of .*: write batching: reference"):
        model(input_ids=ids, use_cache=False, layout=layout)
    model.set_attn_implementation("sdpa")
    model(input_ids=ids, use_cache=False)  # a padded batch after it goes through


@pytest.mark.parametrize("keywords", [{"initial_state": torch.zeros(1)}, {"cu_seqlens": torch.zeros(2)}])
def test_keywords_of_caches_and_other_packings_are_refused_by_name(keywords):
    layout = PackedLayout.of(grow([np.arange(4)]))
    with pytest.raises(ConfigError, match=f"does not compute {next(iter(keywords))} of torch_chunk_gated_delta_rule"):
        Forked("torch_chunk_gated_delta_rule", RULE)(layout=layout, **keywords)


def test_a_function_with_other_keywords_is_refused(monkeypatch):
    """transformers drops keywords that a function does not know: segments would start from nothing."""

    def torch_chunk_gated_delta_rule(query, key, value, g, beta, first_state=None, **keywords):
        pass

    torch_chunk_gated_delta_rule.__module__ = "transformers.models.qwen3_5"
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", torch_chunk_gated_delta_rule)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("qwen3_5_text", **TEXT | DELTA))
    with pytest.raises(ConfigError, match=r"does not have or use .*initial_state"):
        fork_states(model)
