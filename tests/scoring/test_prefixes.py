"""Episodes: the score of each prefix, from one forward in which every frame is computed once."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlmrm import load_scorer
from vlmrm.errors import MediaError, RowError
from vlmrm.modeling.kernels import log_once
from vlmrm.modeling.tiny import make_tiny_reward_model

TASK = "Push the block to the goal."
T = 12
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def frames():
    pixels = np.random.default_rng(0).integers(0, 256, (T, 64, 96, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def model(request, tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def scorer(model):
    return load_scorer(model, dtype="float32")


def prefix(frames, task=TASK) -> list[dict]:
    answer = [{"type": "image", "image": frame} for frame in frames]
    return [{"role": "user", "content": task}, {"role": "assistant", "content": answer}]


def alone(model, frames) -> np.ndarray:
    """Each prefix as a conversation of its own, in a padded forward of its own."""
    padded = load_scorer(model, dtype="float32", batching="reference")
    return np.array([padded.score([prefix(frames[:stop])])[0] for stop in range(1, len(frames) + 1)])


def forwards(scorer, monkeypatch) -> list[int]:
    """Return a list to which each later forward adds its number of tokens."""
    tokens: list[int] = []
    original = scorer.engine.forward

    def forward(inputs):
        tokens.append(inputs["input_ids"].numel())
        return original(inputs)

    monkeypatch.setattr(scorer.engine, "forward", forward)
    return tokens


def test_one_forward_has_the_scores_of_all_prefixes(model, scorer, frames, monkeypatch):
    expected = alone(model, frames)
    tokens = forwards(scorer, monkeypatch)
    scores = scorer.score_prefixes(TASK, frames)
    assert np.abs(scores - expected).max() < TOLERANCE
    # The last prefix has every frame; the others add the two tokens or so that close their turns.
    longest = len(scorer.rendered([prefix(frames)])[0])
    assert len(tokens) == 1 and longest < tokens[0] < longest + 5 * T
    # What the tolerance tells apart: another order of frames, of prefixes, and another task.
    for other in (alone(model, frames[::-1]), expected[::-1], scorer.score_prefixes("Stay.", frames)):
        assert np.abs(scores - np.array(other)).max() > 10 * TOLERANCE


def test_the_budget_cuts_an_episode_without_changing_scores(scorer, frames, monkeypatch):
    expected = scorer.score_prefixes(TASK, frames)
    monkeypatch.setattr(scorer.engine.collator, "max_tokens_per_batch", 300)
    tokens = forwards(scorer, monkeypatch)
    assert scorer.score_prefixes(TASK, frames) == pytest.approx(expected, abs=TOLERANCE)
    assert len(tokens) > 1


def test_a_padded_model_notes_it_and_scores_equally(tiny_reward_model, frames, caplog):
    shared, padded = load_scorer(tiny_reward_model), load_scorer(tiny_reward_model, batching="reference")
    expected = shared.score_prefixes(TASK, frames[:3])
    assert "score_prefixes" not in caplog.text
    log_once.cache_clear()
    for _ in range(2):
        assert padded.score_prefixes(TASK, frames[:3]) == pytest.approx(expected, abs=TOLERANCE)
    assert caplog.text.count("score_prefixes computes each prefix from its start, because its batches are padded") == 1


def test_what_cannot_be_scored_is_named(tiny_reward_model, frames, tmp_path):
    scorer = load_scorer(tiny_reward_model)
    with pytest.raises(RowError, match="no frames"):
        scorer.score_prefixes(TASK, [])
    with pytest.raises(MediaError, match=r"conversation 2: .*gone\.png"):
        scorer.score_prefixes(TASK, [*frames[:2], tmp_path / "gone.png"])
