"""Every row once, whatever the ranks; the interventions are what they say; the table of pairs says what was scored."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from tests.conversations import references
from tests.runs import colour_lists, colour_pairs, text_pairs
from vlmrm.batching import ComparisonCollator
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.engine import Engine
from vlmrm.errors import ConfigError
from vlmrm.evaluation.evaluate import _Share, add_interventions, evaluate
from vlmrm.measures.interventions import INTERVENTIONS, alterations, named
from vlmrm.measures.pairs import scored_frame, scored_pairs
from vlmrm.modeling import batcher_for, load_checkpoint
from vlmrm.rendering import Renderer
from vlmrm.scoring.scorer import LocalScorer


@pytest.fixture(scope="module")
def loaded(tiny_reward_model):
    return load_checkpoint(tiny_reward_model)


@pytest.fixture
def rows(tmp_path):
    paths = [
        colour_pairs(tmp_path / "a", 6, source=["web", "lab"] * 3),
        colour_lists(tmp_path / "b", 3),
        text_pairs(tmp_path / "c", 2),
    ]
    return load_comparisons([str(path) for path in paths], arguments=DataArguments())


def run(loaded, rows, words=("prompt", "blank_image", "swapped_image"), **options):
    batcher = batcher_for(loaded.model, loaded.processor, "shared")
    interventions = {name: INTERVENTIONS[name] for name in named(words)}
    collator = ComparisonCollator(Renderer(loaded.processor), batcher, max_seq_length=512, interventions=interventions)
    return evaluate(Engine(loaded.model, collator), rows, batch_size=4, **options)


def scored_alone(loaded, comparison) -> list[float]:
    return LocalScorer(loaded, batching="shared").score(comparison.conversations())


def test_every_score_equals_its_changed_conversation_alone(loaded, rows):
    result = run(loaded, rows, ["all"])
    assert [c.id for c in result.comparisons] == [row["comparison"].id for row in rows]
    share = _Share(rows, 4, 0, 1, sample=len(rows))
    for place, (comparison, scores, altered) in enumerate(
        zip(result.comparisons, result.scores, result.altered, strict=True)
    ):
        assert scores == pytest.approx(scored_alone(loaded, comparison), abs=1e-5)
        changes = list(alterations(comparison, share[place]["donors"], INTERVENTIONS.values()))
        assert [intervention.name for intervention, _ in changes] == list(altered)
        conversations = [conversation for _, changed in changes for conversation in changed.conversations()]
        expected = LocalScorer(loaded, batching="shared").score(conversations)
        assert [score for scores in altered.values() for score in scores] == pytest.approx(expected, abs=1e-5)
    assert {name for altered in result.altered for name in altered} >= {*named(["image", "quality", "prompt"])}


def test_only_cheap_interventions_run_on_all_rows(loaded, rows):
    whole, part = (run(loaded, rows, ("blank_image", "response_only"), sample=sample) for sample in (None, 4))
    assert all("response_only" in altered for altered in part.altered)
    drawn = {i for i, altered in enumerate(part.altered) if "blank_image" in altered}
    assert 0 < len(drawn) < sum("blank_image" in altered for altered in whole.altered)
    for i, (scores, altered) in enumerate(zip(part.scores, part.altered, strict=True)):
        assert scores == pytest.approx(whole.scores[i], abs=1e-5)
        for name, values in altered.items():
            assert values == pytest.approx(whole.altered[i][name], abs=1e-5)
    frame = scored_frame(part)
    assert (
        frame["blank_image_chosen"].notna().sum()
        == frame["comparison_id"].isin([part.comparisons[i].id for i in drawn]).sum()
    ), "the frame says how many"


def test_a_grown_sample_is_the_larger_one(loaded, rows):
    grown, large = (run(loaded, rows, ["blank_image"], sample=sample) for sample in (3, 8))
    add_interventions(grown, more := run(loaded, rows, ["blank_image"], sample=8, beyond=3))
    assert 0 < len(more.comparisons) < sum(map(bool, large.altered))
    for found, expected in zip(grown.altered, large.altered, strict=True):
        assert found.get("blank_image") == pytest.approx(expected.get("blank_image"), abs=1e-5)


def test_donors_share_kind_but_not_prompt_or_images(rows):
    whole = _Share(rows, 4, 0, 1, sample=len(rows))
    for block in (1, 3):
        for rank in (0, 1):
            share = _Share(rows, block, rank, 2, sample=len(rows))
            for number in range(len(share)):
                row = share[number]
                same = whole[row["index"]]
                assert [donor.id for donor in row["donors"]] == [donor.id for donor in same["donors"]]
                for donor in row["donors"]:
                    own, other = (set(map(str, references(c.prompt))) for c in (row["comparison"], donor))
                    assert bool(own) == bool(other) and not own & other


def test_the_table_has_a_scored_row_per_pair(loaded, rows):
    result = run(loaded, rows)
    frame = scored_frame(result, model="outputs/m", checkpoint="checkpoint-7", step=7, group_by=["source"])
    pairs = scored_pairs(result.comparisons, result.scores)
    pd.testing.assert_frame_equal(frame[pairs.columns], pairs)
    assert len(frame) == sum(len(c.pairs()) for c in result.comparisons)
    first = frame.iloc[0]
    assert (first["comparison_id"], first["step"], first["by/source"]) == ("pair-0", 7.0, "web")
    assert first["chosen_length"] == len("It is red.")
    assert first["blank_image_chosen"] == result.altered[0]["blank_image"][0]
    texts = frame[frame["comparison_id"].str.startswith("text")]
    assert texts["blank_image_chosen"].isna().all() and texts["response_only_chosen"].notna().all()
    lists = frame[frame["comparison_id"] == "list-1"]
    assert sorted(lists["pair"]) == [0, 1, 2] and lists["cluster"].nunique() == 1
    assert math.isnan(first["margin_label"])
    with pytest.raises(ConfigError, match="group_by or cluster_by names nothing"):
        scored_frame(result, group_by=["nothing"])
