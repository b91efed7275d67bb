"""The tiny checkpoint is a real checkpoint: reproducible, loadable, and it speaks Qwen's chat format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmrm import cli, load_scorer
from vlmrm.errors import ConfigError
from vlmrm.modeling.tiny import ARCHITECTURES, make_tiny, make_tiny_reward_model

REAL = Path(os.environ.get("VLMRM_TEST_DATA", "../shared/data")) / "qwen2.5-vl-7b-processor"

CONVERSATION = [
    {
        "role": "user",
        "content": [{"type": "image", "image": Image.new("RGB", (56, 84))}, {"type": "text", "text": "Which digit?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "seven"}]},
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loads_with_transformers_and_sees_images(tmp_path, arch):
    folder = make_tiny(tmp_path / arch, arch=arch)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)

    batch = processor.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
        batch["pixel_values"] = batch["pixel_values"] + 1
        changed = model(**batch).logits
    assert logits.isfinite().all()
    assert not torch.allclose(logits[:, -1], changed[:, -1])
    assert model.config.text_config.vocab_size > len(processor.tokenizer)


def test_equal_seeds_write_equal_bytes(tmp_path):
    first, second, third = (make_tiny(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert contents(first) == contents(second)
    assert (first / "model.safetensors").read_bytes() != (third / "model.safetensors").read_bytes()


def test_a_tiny_reward_model_scores_from_command_line(tmp_path):
    command = ["init-tiny", str(tmp_path / "reward"), "--reward", "--seed", "3"]
    cli.app(command, exit_on_error=False, result_action="return_value")
    made = make_tiny_reward_model(tmp_path / "same", seed=3)
    scores = [load_scorer(path, device="cpu").score([CONVERSATION]) for path in (tmp_path / "reward", made)]
    assert scores[0] == scores[1] != [0.0]


def test_unknown_architecture_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'llava'.*qwen2_5_vl"):
        make_tiny(tmp_path / "x", arch="llava")


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs Qwen2.5-VL's processor in {REAL}")
@pytest.mark.parametrize("generate", [False, True])
def test_template_renders_as_qwens_own(tiny_checkpoint, generate):
    tiny, real = (AutoProcessor.from_pretrained(folder) for folder in (tiny_checkpoint, REAL))
    conversations = [
        CONVERSATION,
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi "}],
        [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": " x\n"}]}],
        [*CONVERSATION, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "\n<think>"}],
    ]
    for conversation in conversations:
        rendered = tiny.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate)
        assert rendered == real.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate)
