"""`vlmrm export`: write a checkpoint that vLLM's classify route serves, and transformers opens without vlmrm.

Both take a `<Arch>ForSequenceClassification` with one bias-free linear layer `score` at its top. transformers has no
such class for the Qwen-VL family, so the folder carries a small one, which `trust_remote_code=True` runs; vLLM
converts its own language model by the architecture's name. Neither reads `reward_model.json`, so its pixel limits go
into the image processor, and its sampling into that of videos.
"""

from __future__ import annotations

import base64
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from PIL import Image

from vlmrm.batching import ComparisonCollator
from vlmrm.engine import Engine, rendered_each
from vlmrm.errors import CheckpointError, RowError
from vlmrm.files import require_new_folder
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import batcher_for, sequence_limit
from vlmrm.modeling.checkpoint import load_scoring_files
from vlmrm.modeling.head import head_name
from vlmrm.modeling.loading import load_checkpoint, open_adapter, write_full
from vlmrm.modeling.manifest import is_adapter, verify_if_listed
from vlmrm.modeling.reward_model import REWARD_MODELS
from vlmrm.outputs import ONE
from vlmrm.rendering import Renderer, limited_size

logger = logging.getLogger("vlmrm")

CODE = "modeling_reward.py"


def export(model: str | Path, output_folder: str | Path, *, base_model_path: str | Path | None = None) -> Path:
    """Write a reward model, an adapter merged, with all files that others need to serve it; return the folder.

    `base_model_path` is the base of an adapter, where it has moved.
    """
    output_folder = Path(output_folder)
    require_new_folder(output_folder, "the exported model")
    reward, processor, info = _open(model, base_model_path)
    if reward.config.reward_head != "linear":
        raise CheckpointError(
            f"the head of {model} is {head_name(reward.config.reward_head)}, and others take a linear one without a "
            "bias alone: serve it with vlmrm, or train with head: linear."
        )
    if reward.has_text_positions:
        raise CheckpointError(
            f"{model} gives images the positions of text, as in its training, and others would not: serve it with "
            "vlmrm."
        )
    if reward.outputs != ONE:
        raise CheckpointError(
            f"{model} answers {', '.join(reward.outputs.names)}, which others would read as classes: serve it with "
            "vlmrm."
        )
    if type(reward.config) not in REWARD_MODELS:
        raise CheckpointError(
            f"{model} is a {type(reward).__name__}, which cannot be exported: Qwen2-VL, Qwen2.5-VL, MiMo-VL and "
            "Qwen3-VL can."
        )
    name = type(reward).__name__
    # vLLM looks for the name in the text configuration too.
    reward.config.architectures = reward.config.get_text_config().architectures = [name]
    reward.config.auto_map = {"AutoModelForSequenceClassification": f"{CODE.removesuffix('.py')}.{name}"}
    _set_input(processor, info)
    if info.get("overlong") == "trim":
        logger.warning("%s was trained with overlong: trim, and others do not trim answers: cut them before", model)
    pinned = _pinned(reward, processor)
    step = (verify_if_listed(model) or {}).get("step")
    base = name.replace("ForSequenceClassification", "PreTrainedModel")
    code = _templates().get_template("model.py.jinja").render(name=name, base=base)
    texts = {CODE: code, "README.md": _readme(output_folder.name, info, pinned)}
    provenance = {**info.get("provenance", {}), "exported_from": Path(model).name}
    write_full(
        output_folder, reward, processor, info | {"pinned": [pinned], "provenance": provenance}, step=step, texts=texts
    )
    return output_folder


def _open(model: str | Path, base_model_path: str | Path | None) -> tuple[Any, Any, dict[str, Any]]:
    if not is_adapter(model):
        loaded = load_checkpoint(model, base_model_path=base_model_path)
        return loaded.model, loaded.processor, loaded.info
    verify_if_listed(model)
    processor, info = load_scoring_files(model, base_model_path)
    return open_adapter(model, base_model_path=base_model_path).merge_and_unload(), processor, info


def _set_input(processor: Any, info: dict[str, Any]) -> None:
    limits = info.get("min_pixels"), info.get("max_pixels")
    if limits != (None, None):
        processor.image_processor.size = limited_size(processor, *limits)
    for name, key in {"fps": "video_fps", "max_frames": "video_max_frames"}.items():
        if info.get(key) is not None:
            setattr(processor.video_processor, name, info[key])


def _pinned(model: Any, processor: Any) -> dict[str, Any]:
    """Return a conversation about a small image with its score by the reference batch, to check a server against."""
    levels = np.add.outer(np.arange(0, 168, 2), np.arange(84)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.stack([levels, levels[::-1], 255 - levels], axis=-1)).save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    question = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is this?"}]
    answer = [{"type": "text", "text": "A field of colours, lighter to the right."}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    renderer, batcher = Renderer(processor), batcher_for(model, processor, "reference")
    longest = sequence_limit(model.config, None)
    engine = Engine(model.eval(), ComparisonCollator(renderer, batcher, max_seq_length=longest))
    [score] = engine.score(rendered_each([read_conversation(messages)], renderer.render))
    if isinstance(score, RowError):
        raise CheckpointError(f"the model cannot be exported, as it does not score a small image: {score.reason}.")
    return {"messages": messages, "score": score, "dtype": str(model.dtype).removeprefix("torch.")}


def _readme(title: str, info: dict[str, Any], pinned: dict[str, Any]) -> str:
    base = info.get("provenance", {}).get("base_model")
    template = _templates().get_template("readme.md.jinja")
    return template.render(
        title=title,
        base_model=None if base is None or Path(base).exists() else base,
        mean=info.get("reward_mean"),
        std=info.get("reward_std"),
        code=CODE,
        score=pinned["score"],
        dtype=pinned["dtype"],
    )


def _templates() -> Environment:
    return Environment(loader=PackageLoader("vlmrm.export", "."), trim_blocks=True, keep_trailing_newline=True)
