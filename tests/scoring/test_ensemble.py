"""Several models as one scorer: scaled, combined, in order, with their disagreement."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy import stats

from vlmrm import load_scorer
from vlmrm.errors import CheckpointError, ConfigError, RowError
from vlmrm.formats.openai import read_conversation
from vlmrm.scoring import Scorer
from vlmrm.scoring.ensemble import Ensemble, load_ensemble
from vlmrm.scoring.protocol import all_scores
from vlmrm.scoring.transforms import Normalization

RAW = np.array([[3.0, 1.0, 8.0, 4.0], [0.1, -0.2, 0.0, 0.5], [50.0, 10.0, 90.0, -20.0]])


BAD = -99.0


class Listed:
    """A scorer whose score of the answer "i" is the i-th of its numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def score(self, conversations):
        return all_scores(self.score_each(conversations))

    def score_each(self, conversations):
        found = [float(self.numbers[int(each.answer.text)]) for each in map(read_conversation, conversations)]
        return [RowError("it is bad") if score == BAD else score for score in found]

    def score_groups(self, groups):
        raise NotImplementedError


def asked(*answers: int):
    return [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "text", "text": str(i)}]}]
        for i in answers
    ]


@pytest.mark.parametrize("combine", ["mean", "min"])
def test_members_are_combined_as_z_scores_of_the_call(combine):
    found = Ensemble([Listed(numbers) for numbers in RAW], combine=combine).judge(asked(0, 1, 2, 3))
    scaled = stats.zscore(RAW, axis=1)
    assert found.scores == pytest.approx(getattr(scaled, combine)(axis=0))
    assert found.uncertainty == pytest.approx(scaled.std(axis=0))


def test_by_saved_normalisation_a_score_does_not_depend_on_the_call():
    scales = [Normalization(1.0, 2.0), Normalization(0.0, 0.1), Normalization(10.0, 50.0)]
    members = Ensemble([Listed(numbers) for numbers in RAW], scales=scales)
    expected = ((RAW - [[1.0], [0.0], [10.0]]) / [[2.0], [0.1], [50.0]]).mean(axis=0)
    assert members.score(asked(0, 1, 2, 3)) == pytest.approx(expected)
    assert members.score(asked(3, 1)) == pytest.approx(expected[[3, 1]])


def test_groups_keep_their_order_and_size():
    members = Ensemble([Listed(numbers) for numbers in RAW])
    groups = [("?", ["2", "0"]), ("?", []), ([{"role": "user", "content": "?"}], ["1", "3"])]
    flat = members.judge(asked(2, 0, 1, 3))
    judged = members.judge_groups(groups)
    assert [len(each.scores) for each in judged] == [2, 0, 2]
    assert [score for each in judged for score in each.scores] == flat.scores
    assert [each.scores for each in judged] == members.score_groups(groups)
    assert judged[2].uncertainty == flat.uncertainty[2:]


@pytest.mark.parametrize("combine", ["mean", "min"])
def test_what_one_member_cannot_score_is_left_out_and_changes_no_other_score(combine):
    numbers = RAW.copy()
    numbers[1, 2] = BAD
    members = Ensemble([Listed(row) for row in numbers], combine=combine)
    found = members.score_each(asked(0, 1, 2, 3))
    assert isinstance(found[2], RowError) and found[2].reason == "it is bad"
    assert [found[place] for place in (0, 1, 3)] == members.score(asked(0, 1, 3))
    with pytest.raises(RowError, match="conversation 2: it is bad"):
        members.score(asked(0, 1, 2, 3))


def measured(model, folder, mean: float, std: float):
    shutil.copytree(model, folder)
    (folder / "COMPLETE.json").unlink()
    file = folder / "reward_model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reward_mean": mean, "reward_std": std}))
    return folder


def test_checkpoints_are_opened_once_and_scaled_by_what_they_saved(tiny_reward_model, tmp_path):
    models = [measured(tiny_reward_model, tmp_path / name, m, s) for name, m, s in (("a", 1.0, 2.0), ("b", 0.0, 0.5))]
    members = load_ensemble(models, combine="min", dtype="float32")
    assert isinstance(members, Scorer)
    [raw] = load_scorer(tiny_reward_model, dtype="float32").score(asked(7))
    assert members.member_scores(asked(7))[:, 0] == pytest.approx([(raw - 1) / 2, raw / 0.5], abs=1e-5)
    with pytest.raises(CheckpointError, match=rf"{tiny_reward_model} has no reward_mean"):
        load_ensemble([models[0], tiny_reward_model])


def test_ensembles_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        load_ensemble([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(ConfigError, match="ensemble of 1: name two"):
        Ensemble([Listed(RAW[0])])
    with pytest.raises(ConfigError, match="'max': choose one of mean, min"):
        Ensemble([Listed(RAW[0]), Listed(RAW[1])], combine="max")
    with pytest.raises(ConfigError, match="1 scales for 2 models"):
        Ensemble([Listed(RAW[0]), Listed(RAW[1])], scales=[Normalization(0.0, 1.0)])
    with pytest.raises(ConfigError, match="'group': choose one of saved, call"):
        load_ensemble([tmp_path / "a", tmp_path / "b"], scale="group")
