"""Exported models: opened by transformers without vlmrm, laid out as vLLM's classify route asks, with equal scores."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.modeling.samples import save_adapter
from vlmrm import load_scorer
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.export import export
from vlmrm.modeling import load_for_training, load_processor, make_tiny, save_reward_files, write_complete

# What a stranger runs: transformers alone, by the words of the folder's README.
STRANGER = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoProcessor
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(sys.argv[1])
messages = json.loads(sys.argv[2])
inputs = processor.apply_chat_template([messages], tokenize=True, return_dict=True, return_tensors="pt")
longer = processor.apply_chat_template(
    [messages, messages + messages], tokenize=True, return_dict=True, return_tensors="pt", padding=True
)
with torch.no_grad():
    print(json.dumps([model(**inputs).logits.item(), *model(**longer).logits[:, 0].tolist()]))
assert "vlmrm" not in sys.modules
"""


def reward_model(folder: Path, base: Path, head: str = "linear", **files) -> Path:
    load_for_training(base, head=head).save_pretrained(folder)
    source = {"base_model": "Qwen/Qwen2.5-VL-3B-Instruct"}
    save_reward_files(folder, processor=load_processor(base), head=head, **{"provenance": source, **files})
    write_complete(folder, world_size=1, step=7)
    return folder


def about(image: Path) -> list[dict]:
    question = [{"type": "image", "image": str(image)}, {"type": "text", "text": "Which digit is this?"}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": "It is one."}]},
    ]


def strangers_scores(folder: Path, messages: list[dict], tmp_path: Path) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(folder), json.dumps(messages)],
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_a_stranger_gets_the_scorer_s_score(arch, tmp_path):
    """The image is larger than the checkpoint's limit, which only `reward_model.json` held."""
    shown = {"max_pixels": 64 * 64, "video_fps": 0.5}
    source = reward_model(tmp_path / "trained", make_tiny(tmp_path / "base", arch=arch), shown=shown)
    Image.linear_gradient("L").convert("RGB").resize((160, 128)).save(tmp_path / "digit.png")
    messages = about(tmp_path / "digit.png")
    [expected] = load_scorer(source).score([messages])
    folder = export(source, tmp_path / "exported")
    config = json.loads((folder / "config.json").read_text())
    assert config["problem_type"] == "regression" and len(config["id2label"]) == 1, "as vLLM's classify route asks"
    alone, padded, twice = strangers_scores(folder, messages, tmp_path)
    assert alone == pytest.approx(expected, abs=1e-5)
    assert padded == pytest.approx(expected, abs=1e-5), "padding changes nothing"
    assert abs(twice - expected) > 1e-4
    assert load_scorer(folder).score([messages]) == pytest.approx([expected], abs=1e-5)
    assert json.loads((folder / "reward_model.json").read_text())["video_fps"] == 0.5
    assert load_processor(folder).video_processor.fps == 0.5


def test_the_sample_of_the_readme_checks_copies(tiny_checkpoint, tmp_path):
    source = reward_model(tmp_path / "trained", tiny_checkpoint, reward_mean=0.25, reward_std=2.0)
    folder = export(source, tmp_path / "my-reward")
    readme = (folder / "README.md").read_text()
    assert "vllm serve my-reward --runner pooling --convert classify" in readme
    for program in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        ast.parse(program)
    info = json.loads((folder / "reward_model.json").read_text())
    [pinned] = info["pinned"]
    assert load_scorer(folder).score([pinned["messages"]]) == pytest.approx([pinned["score"]], abs=1e-4)
    assert f"{pinned['score']:.4f} in float32" in readme
    assert (info["reward_mean"], info["reward_std"]) == (0.25, 2.0)


@pytest.mark.smoke
def test_adapters_are_merged(tiny_checkpoint, tmp_path):
    save_adapter(tmp_path / "adapter", tiny_checkpoint)
    Image.new("RGB", (56, 56), "red").save(tmp_path / "red.png")
    messages = about(tmp_path / "red.png")
    folder = export(tmp_path / "adapter", tmp_path / "exported")
    assert not (folder / "adapter_config.json").exists()
    expected = load_scorer(tmp_path / "adapter").score([messages])
    assert load_scorer(folder).score([messages]) == pytest.approx(expected, abs=1e-5)


def test_a_model_without_finite_scores_is_refused(tiny_checkpoint, tmp_path):
    folder = reward_model(tmp_path / "broken", tiny_checkpoint)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": weights["score.weight"] * float("nan")}, folder / "model.safetensors")
    write_complete(folder, world_size=1, step=7)
    with pytest.raises(CheckpointError, match=r"cannot be exported, .*: its score is nan: look for broken weights"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_mlp_head_or_filled_folder_is_refused(tiny_checkpoint, tiny_reward_model, tmp_path):
    with pytest.raises(CheckpointError, match=r"the head of .* is mlp, .*head: linear"):
        export(reward_model(tmp_path / "mlp", tiny_checkpoint, head="mlp"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    for taken in ("mlp", "file"):
        with pytest.raises(ConfigError, match=f"{taken} is not empty: name a new folder"):
            export(tiny_reward_model, tmp_path / taken)
