"""A model proves when it is loaded that it sees and that its shared batches are exact; a switch turns it off."""

from __future__ import annotations

from functools import wraps

import pytest
from transformers import Qwen2_5_VLModel

from tests.runs import assert_equal_weights, colour_pairs
from vlmrm.batching import PaddedBatcher
from vlmrm.errors import CheckpointError
from vlmrm.modeling import kernels, load_checkpoint, load_for_training, load_processor, make_tiny_reward_model
from vlmrm.modeling.attention import batcher_for
from vlmrm.modeling.families import BY_MODEL_TYPE
from vlmrm.modeling.sight import prove_sight
from vlmrm.scoring import load_scorer

BLIND = r"does not see: two different images .* check_sight: false"
WRONG = r"the shared batch is wrong for .* write batching: reference"
UNCHECKED = "check_sight: false: nothing checks that"


@pytest.fixture
def blind(monkeypatch) -> None:
    """A build whose features of images are zeros."""
    features = Qwen2_5_VLModel.get_image_features

    @wraps(features)
    def nothing(self, *args, **kwargs):
        output = features(self, *args, **kwargs)
        output["pooler_output"] = tuple(0 * image for image in output.pooler_output)
        return output

    monkeypatch.setattr(Qwen2_5_VLModel, "get_image_features", nothing)


@pytest.fixture
def dropping(monkeypatch) -> None:
    """A build that drops the features among its other keywords, as transformers 5.15 to 5.17 did."""
    forward = Qwen2_5_VLModel.forward

    @wraps(forward)
    def drop(self, *args, mm_encoder_outputs=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen2_5_VLModel, "forward", drop)


@pytest.fixture
def broken(monkeypatch) -> None:
    """A shared attention in which answers do not see the end of their prompt."""
    along = kernels.along

    def shortsighted(states, ranges, **options):
        keys = along(states, ranges, **options).clone()
        if len(ranges) > 1:
            keys[:, :, : ranges[0][1] - ranges[0][0]] = 0
        return keys

    monkeypatch.setattr(kernels, "along", shortsighted)


@pytest.mark.parametrize("build", ["blind", "dropping"])
def test_a_model_that_does_not_see_is_refused(request, tiny_reward_model, build):
    request.getfixturevalue(build)
    for load in (load_checkpoint, load_scorer):
        with pytest.raises(CheckpointError, match=BLIND) as refused:
            load(tiny_reward_model)
        assert str(tiny_reward_model) in str(refused.value)


def test_only_reference_batching_survives_a_wrong_shared_batch(broken, tiny_reward_model):
    for load in (load_checkpoint, load_scorer):
        with pytest.raises(CheckpointError, match=WRONG):
            load(tiny_reward_model)
    load_scorer(tiny_reward_model, batching="reference")


def test_a_shared_batch_ending_in_error_is_refused(monkeypatch, tiny_reward_model):
    monkeypatch.setattr(kernels, "along", None)
    with pytest.raises(CheckpointError, match=r"wrong for .* it ends in TypeError: .*; write batching: reference"):
        load_checkpoint(tiny_reward_model)


@pytest.mark.parametrize("build", ["blind", "broken"])
def test_a_switched_off_check_loads_with_one_notice(request, tiny_reward_model, caplog, build):
    request.getfixturevalue(build)
    load_scorer(tiny_reward_model, check_sight=False)
    assert caplog.text.count(UNCHECKED) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "mimo_vl"])
def test_every_family_passes_in_every_type(tmp_path, arch, dtype, caplog):
    load_checkpoint(make_tiny_reward_model(tmp_path / arch, arch), dtype=dtype)
    assert not [line for line in caplog.messages if "check_sight" in line]


def test_an_untested_family_failing_its_proof_is_padded(broken, tiny_checkpoint, monkeypatch):
    monkeypatch.delitem(BY_MODEL_TYPE, "qwen2_5_vl")
    model, processor = load_for_training(tiny_checkpoint), load_processor(tiny_checkpoint)
    assert isinstance(batcher_for(model, processor, "shared"), PaddedBatcher), "nothing is proved yet"
    prove_sight(model, processor, name="it", batching="shared")
    assert model.padded_because is not None and not model.proved
    assert isinstance(batcher_for(model, processor, "shared"), PaddedBatcher)
    model.padded_because, model.proved = None, True  # by an earlier proof, after which batches were made
    with pytest.raises(CheckpointError, match=WRONG):
        prove_sight(model, processor, name="it", batching="shared")


@pytest.mark.parametrize(
    ("build", "message", "without"),
    [("blind", BLIND, {"check_sight": False}), ("broken", WRONG, {"batching": "reference"})],
)
def test_a_wrong_build_stops_before_training(request, train_here, tmp_path, build, message, without):
    request.getfixturevalue(build)
    data = colour_pairs(tmp_path / "data", 4)
    with pytest.raises(CheckpointError, match=message):
        train_here(data)
    train_here(data, name="without", max_steps=1, **without)


def test_a_training_that_sees_stays_as_it_was(train_here, tmp_path):
    keys = {"use_peft": True, "lora_dropout": 0.2}  # it draws from the random state
    data = colour_pairs(tmp_path / "data", 4)
    results = [train_here(data, name, max_steps=2, check_sight=name == "on", **keys) for name in ("on", "off")]
    assert_equal_weights(*(result.model_dir for result in results))
