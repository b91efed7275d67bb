"""Robometer on random weights, against transformers' own backbone and the heads written out."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoProcessor, Qwen3VLModel

from tests.runs import write_rows
from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.modeling.published_import import import_reward
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rewards import RewardSet
from vlmrm.scoring.loading import load_scorer
from vlmrm.scoring.protocol import prefixes_of

TASK = "Push the block."
WORDS = "The robot should do this: '{text_prompt}'. How far is it at each frame?"
TOKENS = [f"<|{name}_token|>" for name in ("split", "reward", "pref", "sim", "prog")]
BINS = 10


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Qwen3-VL whose template numbers pictures where it is asked to, as the real one's does."""
    folder = make_tiny(tmp_path_factory.mktemp("base") / "qwen3_vl", "qwen3_vl")
    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("{{- media(part", '{{- "Picture: " if add_vision_id else "" -}}{{- media(part'))
    assert template.read_text() != text
    return folder


@pytest.fixture(scope="module")
def backbone(base):
    """The backbone with rows for the published tokens, in the order in which the published code adds them."""
    model = Qwen3VLModel.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(AutoProcessor.from_pretrained(base).tokenizer) + len(TOKENS))
    return model.eval()


@pytest.fixture(scope="module")
def heads(backbone):
    width = backbone.config.text_config.hidden_size
    generator = torch.Generator().manual_seed(1)

    def weights(outputs: int) -> dict[str, torch.Tensor]:
        shapes = {"0.weight": (width // 2, width), "0.bias": (width // 2,), "1.weight": (width // 2,)}
        shapes |= {"1.bias": (width // 2,), "4.weight": (outputs, width // 2), "4.bias": (outputs,)}
        return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}

    return {"progress_head": weights(BINS), "success_head": weights(1), "preference_head": weights(1)}


@pytest.fixture(scope="module")
def frames():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 70, 100, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


@pytest.fixture
def resized(frames):
    return [frame.resize((96, 64)) for frame in frames]  # the nearest multiples of 32


@pytest.fixture
def imported(base, backbone, heads, tmp_path):
    """The checkpoint of both heads as outputs of one model."""
    folder = written(tmp_path, backbone, heads, "model.")
    layout = {"layout": "robometer", "base": base, "template": folder / "words.txt"}
    return import_reward(folder / "model.safetensors", tmp_path / "imported", **layout).folder


def written(folder, backbone, heads, prefix: str, shards: int = 1):
    """Write the weights below `prefix`, with the unused ones that published files have, and the words."""
    weights = {f"{prefix}{name}": value for name, value in backbone.state_dict().items()}
    weights |= {f"{head}.{name}": value for head, named in heads.items() for name, value in named.items()}
    weights |= {"frame_pool_attn.weight": torch.zeros(1, 4), "model.lm_head.weight": torch.zeros(2, 4)}
    names = sorted(weights)
    files = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number}.safetensors"
        save_file({name: weights[name].clone() for name in names[number::shards]}, folder / file)
        files |= dict.fromkeys(names[number::shards], file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "words.txt").write_text(WORDS)
    return folder


def rewards(folder, base, **changes) -> RewardSet:
    settings = {"name": "meter", "reward_model": "robometer", "model_name_or_path": str(folder)}
    settings |= {"base_name_or_path": str(base), "template_file": str(folder / "words.txt"), "dtype": "float32"}
    return RewardSet([{**settings, "device": "cpu", "batch_size": 4, **changes}])


def logits(base, backbone, heads, frames) -> tuple[torch.Tensor, torch.Tensor]:
    """The bins of progress [T, 10] and the logits of success [T] at each frame, by transformers alone."""
    processor = AutoProcessor.from_pretrained(base)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    shown = "Picture: <|vision_start|><|image_pad|><|vision_end|><|prog_token|>" * len(frames)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"{WORDS.replace('{text_prompt}', TASK)}{shown}<|im_end|>\n"
    )
    resized = [frame.resize((96, 64)) for frame in frames]
    inputs = processor(text=[text], images=resized, do_resize=False, return_tensors="pt")
    hidden = backbone(**inputs).last_hidden_state[0]
    read = hidden[inputs["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids("<|prog_token|>")]

    def head(named) -> torch.Tensor:
        inner = functional.linear(read, named["0.weight"], named["0.bias"])
        inner = functional.gelu(functional.layer_norm(inner, inner.shape[-1:], named["1.weight"], named["1.bias"]))
        return functional.linear(inner, named["4.weight"], named["4.bias"])

    return head(heads["progress_head"]), head(heads["success_head"])[:, 0]


@torch.inference_mode()
def theirs(base, backbone, heads, frames) -> dict[str, np.ndarray]:
    bins, success = logits(base, backbone, heads, frames)
    return {"progress": (bins.softmax(-1) @ torch.linspace(0, 1, BINS)).numpy(), "success": success.sigmoid().numpy()}


@pytest.mark.parametrize(("prefix", "shards"), [("model.", 1), ("model.model.", 3)])  # as published, and LeRobot's
def test_it_reads_progress_and_success_after_every_frame(base, backbone, heads, frames, tmp_path, prefix, shards):
    folder = written(tmp_path, backbone, heads, prefix, shards)
    expected = theirs(base, backbone, heads, frames)
    for output in ("progress", "success"):
        made = rewards(folder, base, output=output)
        found = made.rewards[0].model.score_prefixes(TASK, frames)
        assert found == pytest.approx(expected[output], abs=1e-5) and np.ptp(found) > 0.01
        scored = made(prompt=[TASK] * 2, video=[frames, frames[:2]]).rewards["meter"]
        assert scored == pytest.approx(expected[output][[4, 1]], abs=1e-5)
        assert abs(made(prompt=["Stay."], video=[frames]).rewards["meter"][0] - expected[output][4]) > 1e-4


def test_both_are_outputs_of_one_imported_model(base, backbone, heads, resized, imported):
    expected = theirs(base, backbone, heads, resized)
    scorer = load_scorer(imported, dtype="float32")
    values = scorer.score_outputs(prefixes_of(TASK, resized))
    for name, head in (("done", "progress"), ("success", "success")):
        assert [value[name] for value in values] == pytest.approx(expected[head], abs=1e-5)
    assert scorer.score_prefixes(TASK, resized) == pytest.approx(expected["progress"], abs=1e-5)


def test_steps_of_training_are_those_of_two_heads(base, backbone, heads, resized, imported, tmp_path, train_here):
    """Of the backbone and each head, beside steps by hand in float64."""
    for number, frame in enumerate(resized):
        frame.save(tmp_path / f"{number}.png")
    way, done = [0, 0.2, 0.5, 0.85, 1], [0.0, 0, 0, 1, 1]
    row = {"task": TASK, "frames": [f"{number}.png" for number in range(5)], "progress": way, "success": done}
    keys = {"outputs": ["done=progress in 10", "success=correctness"], "total": ["done=1"], "optim": "sgd"}
    keys |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0}

    train_here(write_rows(tmp_path / "rows.jsonl", [row]), model=imported, max_steps=3, **keys)

    model = copy.deepcopy(backbone).double()
    own = {head: {name: w.double().requires_grad_() for name, w in named.items()} for head, named in heads.items()}
    optimizer = torch.optim.SGD([*model.parameters(), *(w for named in own.values() for w in named.values())], 1e-3)
    way, done = torch.tensor([way, done], dtype=torch.float64)
    target = (1 - (way[:, None] - torch.linspace(0, 1, BINS)).abs() * (BINS - 1)).clamp(min=0)  # the two next to it
    losses = []
    for _ in range(3):
        progress, success = logits(base, model, own, resized)
        loss = functional.binary_cross_entropy_with_logits(success, done) + functional.cross_entropy(progress, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    log = json.loads((tmp_path / "out/checkpoint-3/trainer_state.json").read_text())["log_history"]
    assert [step["loss"] for step in log if "loss" in step] == pytest.approx(losses, abs=1e-4)
    trained = load_file(tmp_path / "out/final/model.safetensors")
    parts = (own["progress_head"], own["success_head"])
    joined = {f"score_hidden.{name}": torch.cat([of[name] for of in parts]) for name in parts[0] if name[0] != "4"}
    joined["score.weight"] = torch.block_diag(*(of["4.weight"] for of in parts))
    name = "language_model.layers.0.mlp.down_proj.weight"
    joined[f"model.{name}"] = model.state_dict()[name]
    for name, value in joined.items():
        assert torch.allclose(trained[name].double(), value, atol=1e-5)
    assert not torch.allclose(own["progress_head"]["4.weight"].float(), heads["progress_head"]["4.weight"], atol=1e-3)


def test_what_cannot_be_is_refused(base, backbone, heads, frames, tmp_path):
    folder = written(tmp_path, backbone, heads, "model.")
    with pytest.raises(RewardError, match=r"its task spells <\|prog_token\|>"):
        rewards(folder, base)(prompt=["Push <|prog_token|>."], video=[frames])
    with pytest.raises(ConfigError, match="output is 'preference': choose from progress, success"):
        rewards(folder, base, output="preference")
    with pytest.raises(ConfigError, match="has no template_file"):
        rewards(folder, base, template_file=None)
    with pytest.raises(CheckpointError, match="has no progress_head: it is no checkpoint of Robometer"):
        rewards(folder, base, model_name_or_path=str(base))
    del heads["progress_head"]["1.bias"]
    broken = tmp_path / "broken"
    broken.mkdir()
    written(broken, backbone, heads, "model.")
    with pytest.raises(CheckpointError, match=r"1\.bias is missing"):
        rewards(broken, base)
