"""What a scorer keeps between calls: the scores are the same, what is known is not computed, and bytes are bounded."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from tests.batching.test_shared import CASES
from vlmrm import load_scorer
from vlmrm.batching.caches import ByteCache
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import write_complete
from vlmrm.modeling.tiny import make_tiny_reward_model
from vlmrm.scoring.scorer import LocalScorer

BYTES = 10**8
ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")  # windows in the tower, deepstack, states; positions in 3 axes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    return {arch: make_tiny_reward_model(folder / arch, arch=arch) for arch in ARCHITECTURES}


@pytest.fixture
def kept(folders) -> LocalScorer:
    return open_scorer(folders["qwen2_5_vl"])


def open_scorer(folder, **options) -> LocalScorer:
    scorer = load_scorer(folder, **{"cache_bytes": BYTES, "check_sight": False, "check_files": False, **options})
    assert isinstance(scorer, LocalScorer)
    return scorer


def png(seed: int, side: int = 84) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def conversation(picture, answer: str, question: str = "Which digit is this?"):
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@contextmanager
def counted(scorer: LocalScorer):
    """Counts the tokens that the language model reads, the images that the tower does, and those processed."""
    counts = {"tokens": 0, "images": 0, "processed": 0}

    def read(module, args, kwargs):
        counts["tokens"] += kwargs["inputs_embeds"].shape[1]

    def ran(module, args, kwargs):
        counts["images"] += len(kwargs.get("grid_thw", args[-1]))

    def processed(*args):
        counts["processed"] += 1
        return process(*args)

    process = scorer.renderer._process_one
    scorer.renderer._process_one = processed
    hooks = [
        scorer.model.language_model.register_forward_pre_hook(read, with_kwargs=True),
        scorer.model.model.visual.register_forward_pre_hook(ran, with_kwargs=True),
    ]
    yield counts
    scorer.renderer._process_one = process
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scores_with_caches_are_those_without(folders, arch):
    scorer, plain = open_scorer(folders[arch]), open_scorer(folders[arch], cache_bytes=0, batching="reference")
    assert (scorer.prompts_kept, plain.prompts_kept) == ("yes", "off")
    for case in CASES.values():
        conversations = list(map(read_conversation, case))
        expected = plain.score(conversations)
        one_by_one = [score for conversation in conversations for score in scorer.score([conversation])]
        torch.testing.assert_close(one_by_one, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(scorer.score(conversations), expected, rtol=0, atol=1e-5)
    everything = [read_conversation(conversation) for case in CASES.values() for conversation in case]
    torch.testing.assert_close(scorer.score(everything), plain.score(everything), rtol=0, atol=1e-5)


def test_a_later_answer_costs_its_own_tokens_and_no_picture(kept):
    with counted(kept) as first:
        kept.score([conversation(png(0), "one")])
    assert (first["images"], first["processed"]) == (1, 1)
    with counted(kept) as later:
        kept.score([conversation(png(0), answer) for answer in ("two", "three")])
        kept.score([conversation(png(0), "four")])
    assert (later["images"], later["processed"]) == (0, 0)
    assert later["tokens"] < first["tokens"]
    own = [kept.rendered([conversation(png(0), answer)])[0] for answer in ("two", "three", "four")]
    assert later["tokens"] <= sum(len(item) - item.prompt for item in own)


def test_another_question_about_a_picture_runs_no_tower(kept):
    kept.score([conversation(png(0), "one")])
    with counted(kept) as counts:
        kept.score([conversation(png(0), "one", "Is it odd?")])
    assert (counts["images"], counts["processed"]) == (0, 0)


def test_after_clear_caches_everything_is_computed_again(kept):
    with counted(kept) as first:
        score = kept.score([conversation(png(0), "one")])
    kept.clear_caches()
    assert (len(kept.cache), kept.cache.size) == (0, 0)
    with counted(kept) as again:
        assert kept.score([conversation(png(0), "one")]) == score
    assert again == first


def test_another_picture_in_the_same_file_is_not_taken_for_the_first(kept, tmp_path):
    file = tmp_path / "picture.bmp"
    scores = []
    for seed in (0, 1):
        Image.open(io.BytesIO(png(seed))).save(file)  # all of one size
        scores += kept.score([conversation(str(file), "one")])
    expected = [kept.score([conversation(png(seed), "one")])[0] for seed in (0, 1)]
    assert abs(scores[0] - scores[1]) > 1e-4
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def tensors_of(scorer: LocalScorer) -> int:
    """The bytes of all tensors that the cache holds, by their storages."""
    seen: dict[int, int] = {}

    def walk(value) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, list | tuple):
            for part in value:
                walk(part)
        elif hasattr(value, "__dict__"):
            walk(vars(value))

    walk(scorer.cache._values)
    return sum(seen.values())


def test_the_bytes_of_all_that_is_kept_stay_in_the_budget(folders):
    unbounded = open_scorer(folders["qwen2_5_vl"])
    unbounded.score([conversation(png(0), "one")])
    one = unbounded.cache.size
    assert one == tensors_of(unbounded)
    scorer = open_scorer(folders["qwen2_5_vl"], cache_bytes=int(2.5 * one))
    expected = [unbounded.score([conversation(png(seed), "two")])[0] for seed in range(6)]
    for _ in range(2):
        for seed in range(6):
            [score] = scorer.score([conversation(png(seed), "two")])
            assert score == pytest.approx(expected[seed], abs=1e-5)
            assert tensors_of(scorer) == scorer.cache.size <= 2.5 * one
    with counted(scorer) as counts:
        scorer.score([conversation(png(5), "three")])  # the latest is there
    assert counts["images"] == 0
    with counted(scorer) as counts:
        scorer.score([conversation(png(0), "three")])  # the oldest is not
    assert counts["images"] == 1


def test_what_is_over_the_budget_by_itself_drives_nothing_out():
    cache = ByteCache(100)
    cache.put(("media", "a"), "a", [torch.zeros(20)])
    cache.put(("media", "b"), "b", [torch.zeros(26)])
    assert (cache.get(("media", "a")), cache.get(("media", "b")), cache.size) == ("a", None, 80)
    cache.put(("media", "c"), "c", [torch.zeros(5)])
    cache.get(("media", "a"))
    cache.put(("media", "d"), "d", [torch.zeros(5)])
    assert [cache.get(("media", name)) for name in "acd"] == ["a", None, "d"], "the least recently used goes"


def test_a_scorer_says_why_it_computes_prompts_again(folders):
    padded = open_scorer(folders["qwen2_5_vl"], batching="reference")
    assert padded.prompts_kept == "padded"
    kept = open_scorer(folders["qwen2_5_vl"])
    first = [score for answer in "ab" for score in padded.score([conversation(png(0), answer)])]
    torch.testing.assert_close(first, kept.score([conversation(png(0), a) for a in "ab"]), rtol=0, atol=1e-5)
    with counted(padded) as counts:
        padded.score([conversation(png(0), "c")])
    assert counts["processed"] == 0, "media are kept all the same"


def test_gradients_of_pictures_do_not_come_from_a_cache(kept):
    pictures = torch.rand(2, 3, 84, 84, requires_grad=True)
    prompt = [{"role": "user", "content": "Draw a digit."}]
    for _ in range(2):
        kept.score_images(prompt, pictures).sum().backward()
    assert pictures.grad is not None and pictures.grad.abs().max() > 0


def test_a_window_is_counted_back_into_a_kept_prompt(folders, tmp_path):
    folder = make_tiny_reward_model(tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_complete(folder, world_size=1, step=0)
    scorer, plain = open_scorer(folder), open_scorer(folder, cache_bytes=0, batching="reference")
    asked = [conversation(png(0), answer) for answer in ("one", "It is the digit two.", "3")]
    one_by_one = [score for item in asked for score in scorer.score([item])]
    torch.testing.assert_close(one_by_one, plain.score(asked), rtol=0, atol=1e-5)
    without = open_scorer(folders["qwen2_5_vl"], cache_bytes=0).score(asked)
    assert max(abs(a - b) for a, b in zip(one_by_one, without, strict=True)) > 1e-4, "the window changes scores"


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1e9"])
def test_a_budget_is_a_number_of_bytes(folders, wrong):
    with pytest.raises(ConfigError, match="cache_bytes"):
        open_scorer(folders["qwen2_5_vl"], cache_bytes=wrong)
