"""What a scorer keeps between calls: the scores are the same, what is known is not computed, and bytes are bounded."""

from __future__ import annotations

import io
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from tests.batching.test_shared import CASES
from vlmrm import load_scorer
from vlmrm.batching.caches import usual_limit
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_conversation
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
    for case in CASES.values():
        conversations = list(map(read_conversation, case))
        expected = plain.score(conversations)
        one_by_one = [score for conversation in conversations for score in scorer.score([conversation])]
        torch.testing.assert_close(one_by_one, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(scorer.score(conversations), expected, rtol=0, atol=1e-5)


def test_a_later_answer_costs_only_its_own_tokens(kept):
    later = [conversation(png(0), answer) for answer in ("two", "three", "four")]
    kept.score([conversation(png(0), "one")])
    with counted(kept) as counts:
        kept.score(later[:2])
        kept.score(later[2:])
    assert (counts["images"], counts["processed"]) == (0, 0)
    assert counts["tokens"] <= sum(len(item) - item.prompt for item in kept.rendered(later))


def test_another_question_runs_no_tower_until_caches_clear(kept):
    kept.score([conversation(png(0), "one")])
    for images in (0, 1):
        with counted(kept) as counts:
            kept.score([conversation(png(0), "one", "Is it odd?")])
        assert (counts["images"], counts["processed"]) == (images, images)
        kept.clear_caches()


def test_another_picture_in_one_file_is_seen(kept, tmp_path):
    file = tmp_path / "picture.bmp"
    scores = []
    for seed in (0, 1):
        Image.open(io.BytesIO(png(seed))).save(file)  # all of one size
        scores += kept.score([conversation(str(file), "one")])
    expected = [kept.score([conversation(png(seed), "one")])[0] for seed in (0, 1)]
    assert abs(scores[0] - scores[1]) > 1e-4
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_everything_kept_stays_within_the_byte_budget(folders):
    unbounded = open_scorer(folders["qwen2_5_vl"])
    expected = [unbounded.score([conversation(png(seed), "two")])[0] for seed in range(6)]
    budget = int(2.5 * unbounded.cache.size / 6)
    scorer = open_scorer(folders["qwen2_5_vl"], cache_bytes=budget)
    for seed in [*range(6)] * 2:
        assert scorer.score([conversation(png(seed), "two")])[0] == pytest.approx(expected[seed], abs=1e-5)
        assert scorer.cache.size <= budget
    for seed, images in ((5, 0), (0, 1)):  # the latest is there, and the oldest is not
        with counted(scorer) as counts:
            scorer.score([conversation(png(seed), "three")])
        assert counts["images"] == images


@pytest.mark.parametrize(("free", "host", "kept"), [(40, 800, 10), (40, 32, 4), (3, 800, 1)])
def test_the_usual_limit_follows_the_memory_of_the_gpu(folders, monkeypatch, free, host, kept):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free * 2**30, 99 * 2**30))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": host * 2**18}.get)
    assert usual_limit(torch.device("cuda")) == kept * 2**30
    assert usual_limit(torch.device("cpu")) == open_scorer(folders["qwen3_vl"], cache_bytes=None).cache.limit == 2**30


@pytest.mark.parametrize(
    ("options", "said"), [({}, "yes"), ({"cache_bytes": 0}, "off"), ({"batching": "reference"}, "padded")]
)
def test_a_scorer_says_whether_it_keeps_prompts(folders, options, said):
    assert open_scorer(folders["qwen2_5_vl"], **options).prompts_kept == said


def test_picture_gradients_do_not_come_from_caches(kept):
    pictures = torch.rand(2, 3, 84, 84, requires_grad=True)
    prompt = [{"role": "user", "content": "Draw a digit."}]
    for _ in range(2):
        kept.score_images(prompt, pictures).sum().backward()
    assert pictures.grad is not None and pictures.grad.abs().max() > 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1e9"])
def test_a_budget_is_a_number_of_bytes(folders, wrong):
    with pytest.raises(ConfigError, match="cache_bytes"):
        open_scorer(folders["qwen2_5_vl"], cache_bytes=wrong)
