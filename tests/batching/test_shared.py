"""The shared batch equals the padded one: every score and every gradient."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import get_peft_model
from PIL import Image
from transformers import AutoProcessor

from tests.families.reference import rounding_nowhere
from vlmrm.batching.shared import PackedLayout, SharedBatcher, path_positions
from vlmrm.batching.tree import common_prefix, grow
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import ModelArguments, freeze, load_for_training, lora_config
from vlmrm.modeling.attention import batcher_for, shared_prefix
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def user(*parts) -> dict:
    return {
        "role": "user",
        "content": [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts],
    }


def image(width: int, height: int, seed: int) -> dict:
    return {"type": "image", "image": picture(width, height, seed)}


def video(frames: int, seed: int) -> dict:
    return {
        "type": "video",
        "video": [picture(56, 56, seed + i) for i in range(frames)],
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
    }


def answer(text) -> dict:
    return {"role": "assistant", "content": text if isinstance(text, list) else [{"type": "text", "text": text}]}


RED, BLUE = image(56, 56, 1), image(112, 84, 2)
CASES = {
    "one pair": [[user(RED, "What?"), answer(a)] for a in ("It is a cat.", "dog")],
    "different sizes and lengths": [
        *([user(RED, "What is in the image?"), answer(a)] for a in ("yes", "a much longer answer than the other")),
        *([user(BLUE, "Is it?"), answer(a)] for a in ("no no no", "n")),
    ],
    "several images": [[user(RED, BLUE, image(84, 56, 3), "Compare."), answer(a)] for a in ("one", "two")],
    "a shared image": [
        *([user(RED, "First question?"), answer(a)] for a in ("a", "b")),
        *([user(RED, "Second question?"), answer(a)] for a in ("c", "d")),
    ],
    "images in the answers": [[user("Draw it."), answer([i])] for i in (RED, BLUE, image(84, 84, 4))],
    "prompt ends at an image": [[user("Look:", RED), answer(a)] for a in ("a", "")],
    "ranked list": [[user(RED, "Rank."), answer(a)] for a in ("a", "a b", "a b c", "d", "a b")],
    "irrelevant branches": [
        *([user(RED, "What?"), answer(a)] for a in ("red one", "other")),
        *([user(BLUE, "Who?"), answer(a)] for a in ("blue", "green")),
        *([user(BLUE, "Who?"), answer(a)] for a in ("red one", "other")),
    ],
    "text only": [[user("Is it?"), answer(a)] for a in ("y", "n")],
    "turns": [[user(RED, "What?"), answer("A."), user(BLUE, "And?"), answer(a)] for a in ("B.", "C.")],
    "one is the start of another": [[user("Q"), answer("A")], [user("Q"), answer("A"), user("R"), answer("B")]],
    "video": [[user(video(4, 10), "What?"), answer(a)] for a in ("it moves", "no")],
    "image after a video": [[user(video(3, 20), RED, "Both?"), answer(a)] for a in ("x", "y z")],
    "video and image": [[user(RED, video(3, 20), "Both?"), answer(a)] for a in ("x", "y z")],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return {arch: make_tiny(folder / arch, arch=arch) for arch in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "mimo_vl")}


def scored(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores, and the gradient of each parameter, of a Bradley-Terry loss over neighbouring conversations."""
    scores = model.train()(**inputs).logits.squeeze(-1)
    loss = -torch.nn.functional.logsigmoid(scores[:-1] - scores[1:]).mean()
    loss.backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_type(inputs, dtype):
    """The inputs with their floating-point tensors in `dtype`."""
    if isinstance(inputs, dict):
        return {name: in_type(value, dtype) for name, value in inputs.items()}
    return inputs.to(dtype) if torch.is_tensor(inputs) and inputs.is_floating_point() else inputs


def both(folder, conversations, prepare=lambda model: model, dtype=torch.float32):
    """The reference's and the shared batch's (scores, gradients), of equal models that `prepare` changes."""
    processor = AutoProcessor.from_pretrained(folder)
    cache = {}
    rendered = [Renderer(processor).render(read_conversation(c), cache) for c in conversations]
    results = []
    for batching in ("reference", "shared"):
        model = load_for_training(folder, dtype=torch.float32, attn_implementation="sdpa", seed=1)
        inputs = batcher_for(model, processor, batching)(rendered)
        inputs = in_type(inputs, dtype)
        if batching == "shared":
            assert "layout" in inputs and inputs["input_ids"].numel() < sum(map(len, rendered)), "it was not shared"
        with rounding_nowhere() if dtype == torch.float64 else nullcontext():
            results.append(scored(prepare(model.to(dtype)), inputs))
    return results


def assert_equal(results, tolerance: float) -> None:
    (scores, gradients), (shared_scores, shared_gradients) = results
    torch.testing.assert_close(shared_scores, scores, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == shared_gradients.keys()
    assert len(gradients) > 0
    for name, gradient in gradients.items():
        distance = (shared_gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-3)
        assert distance <= tolerance, f"{name}: {distance}"


@pytest.mark.parametrize("name", CASES)
def test_in_float64_they_are_equal_to_rounding(checkpoints, name):
    assert_equal(both(checkpoints["qwen2_5_vl"], CASES[name], dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen3_vl", "mimo_vl"])
@pytest.mark.parametrize("name", ["irrelevant branches", "several images", "video and image"])
def test_of_every_architecture(checkpoints, arch, name):
    assert_equal(both(checkpoints[arch], CASES[name]), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(checkpoints, reentrant):
    def checkpointing(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    folder, case = checkpoints["qwen2_5_vl"], CASES["irrelevant branches"]
    results = both(folder, case, checkpointing)
    assert_equal(results, 1e-5)
    plain = both(folder, case)[1]
    if not reentrant:  # a reentrant first block over pixels keeps no gradient of the patch embedding
        assert_equal([plain, results[1]], 1e-5)


def test_with_lora(checkpoints):
    def adapted(model):
        torch.manual_seed(3)
        return get_peft_model(model, lora_config(ModelArguments(use_peft=True), model))

    results = both(checkpoints["qwen2_5_vl"], CASES["irrelevant branches"], adapted)
    assert_equal(results, 1e-5)
    assert any("lora" in name for name in results[0][1])


def test_with_a_frozen_vision_tower(checkpoints):
    def frozen(model):
        freeze(model, vit=True, merger=True)
        return model

    results = both(checkpoints["qwen2_5_vl"], CASES["a shared image"], frozen)
    assert_equal(results, 1e-5)
    assert not any("visual" in name for name in results[1][1])


def test_bfloat16_errors_of_shared_batches_match_the_reference(checkpoints):
    folder, case = checkpoints["qwen2_5_vl"], CASES["irrelevant branches"]
    exact = both(folder, case)[0][0]
    reference, shared = (scores for scores, _ in both(folder, case, dtype=torch.bfloat16))
    assert (shared - exact).abs().max() <= 3 * (reference - exact).abs().max() + 1e-3


def rendered_of(checkpoints, conversations):
    processor = AutoProcessor.from_pretrained(checkpoints["qwen2_5_vl"])
    cache = {}
    rendered = [Renderer(processor).render(read_conversation(c), cache) for c in conversations]
    model = load_for_training(checkpoints["qwen2_5_vl"], attn_implementation="sdpa")
    return batcher_for(model, processor, "shared"), rendered


def test_each_image_and_shared_token_occurs_once(checkpoints):
    batcher, rendered = rendered_of(checkpoints, CASES["irrelevant branches"])
    inputs = batcher(rendered)
    assert len(inputs["media"]["image"]["tensors"]["image_grid_thw"]) == 2
    assert inputs["input_ids"].shape[1] < sum(map(len, rendered)) / 2


def test_parts_within_budget_count_shared_tokens_once(checkpoints):
    batcher, rendered = rendered_of(checkpoints, CASES["irrelevant branches"])
    units = [[rendered[i], rendered[i + 1]] for i in (0, 2, 4)]
    sizes = [size_of(batcher(unit)) for unit in units]
    together = size_of(batcher([*units[1], *units[2]]))  # answers under one prompt
    assert together < sizes[1] + sizes[2]
    assert sorted(map(sorted, batcher.split(units, together))) == [[0], [1, 2]]
    assert [len(part) for part in batcher.split(units, 1)] == [1, 1, 1]
    assert sorted(batcher.split(units, 10**6)[0]) == [0, 1, 2]


def test_an_image_costs_again_in_another_part():
    batcher = SharedBatcher(path_positions, [], {9}, False)
    units = [[rendered_with(word, name)] for word, name in ((1, "A"), (2, "B"), (3, "A"))]
    assert batcher.size(units[0]) == 4 + 5
    assert batcher.split(units, 9 + 4) == [[0], [1], [2]]


def test_a_prefix_ending_inside_an_image_is_dropped():
    batcher = SharedBatcher(path_positions, [], {9}, False)
    ends = range(1, 6)
    kept = [batcher.prefix(replace(rendered_with(1, "A", 2, 3), prompt=end)) is not None for end in ends]
    assert kept == [True, False, False, True, True]


def size_of(inputs) -> int:
    """Tokens and patches of a forward, as they are in its tensors."""
    tensors = inputs["media"].get("image", {}).get("tensors", {}) if "media" in inputs else inputs
    return inputs["input_ids"].numel() + len(tensors.get("pixel_values", ()))


def test_equal_answers_are_computed_once(checkpoints):
    batcher, rendered = rendered_of(checkpoints, CASES["ranked list"])
    ends = batcher(rendered)["branch_ends"].tolist()
    assert ends[1] == ends[4]
    assert len(set(ends)) == 4


def test_a_batch_ignores_where_its_images_lie(checkpoints, tmp_path):
    """Down to the order of its segments, which decides the last bits of sums."""
    batches = []
    for name in "abcdef":
        (tmp_path / name).mkdir()
        files = [tmp_path / name / f"{seed}.png" for seed in range(3)]
        for seed, file in enumerate(files):
            picture(56, 56, seed).save(file)
        prompts = [user({"type": "image", "image": str(file)}, "What?") for file in files]
        batcher, rendered = rendered_of(checkpoints, [[prompt, answer(a)] for prompt in prompts for a in "ab"])
        batches.append(batcher(rendered))
    for batch in batches[1:]:
        assert list(batch["layout"].spans) == list(batches[0]["layout"].spans)
        for key in ("input_ids", "position_ids", "branch_ends", "media"):
            torch.testing.assert_close(batch[key], batches[0][key], rtol=0, atol=0)


def rendered_with(*items) -> Rendered:
    """A conversation of words, by their ids, and images of three tokens and five patches, by their keys."""
    ids = [token for item in items for token in ([9] * 3 if isinstance(item, str) else [item])]
    pixels = {"pixel_values": torch.zeros(5, 1)}
    media = tuple(ProcessedMedia(item, "image", pixels, "", [9] * 3) for item in items if isinstance(item, str))
    return Rendered(ids, [int(token == 9) for token in ids], media)


@pytest.mark.parametrize(
    ("images_see_all", "other", "shared"),
    [
        (False, [1, "A", 3, "B", 4], 4),
        (True, [1, "A", 3, "B", 4], 1),  # the first image sees the second, and so the word between them
        (True, [1, "A", 2, "B", 4], 8),
        (False, [1, "A", "A", 2], 1),  # a run of six, of which three are no prefix
    ],
)
def test_images_are_shared_where_their_context_is_equal(images_see_all, other, shared):
    batcher, numbers = SharedBatcher(path_positions, [], {9}, images_see_all), {}
    first, second = (batcher.identities(rendered_with(*items), numbers) for items in ([1, "A", 2, "B", 3], other))
    assert common_prefix(first, second) == shared


tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def test_a_prefix_that_saves_little_is_repeated():
    computed = {}
    for common in (3, 5):
        answers = [np.repeat([0, answer], [common, 40]) for answer in (1, 2)]
        computed[common] = len(grow(answers))
    assert computed == {3: 2 * 43, 5: 5 + 2 * 40}


@given(tokens)
def test_a_tree_holds_every_sequence_along_its_paths(lists):
    sequences = [np.array(values) for values in lists]
    tree = grow(sequences)
    for sequence, end in zip(sequences, tree.ends, strict=True):
        path = [tree.segments[i] for i in tree.path(end)]
        along = np.concatenate([sequences[s.sequence][s.begin : s.end] for s in path])
        np.testing.assert_array_equal(along, sequence)
    assert len(tree) <= sum(len(values) for values in {tuple(values) for values in lists})
    for number, segment in enumerate(tree.segments):
        assert len(segment) > 0 and segment.parent < number


def attend(**keywords):
    layout = PackedLayout.of(grow([np.arange(6), np.arange(5)]))
    states = torch.randn(1, 2, len(layout), 8, generator=torch.manual_seed(0))
    return shared_prefix(torch.nn.Identity(), states, states, states, None, layout=layout, **keywords)[0]


@pytest.mark.parametrize(
    "keywords",
    [{"sliding_window": 5}, {"is_causal": False}, {"cu_seq_lens_q": torch.tensor([0, 3])}, {"of_tomorrow": 1}],
)
def test_attention_refuses_unsupported_keywords_by_name(keywords):
    with pytest.raises(ConfigError, match=f"does not compute {next(iter(keywords))}"):
        attend(**keywords)
