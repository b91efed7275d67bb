"""Published checkpoints, by their names and shapes: each weight lands in the reward model, and only the head is new.

`published/*.json` has the configuration of each checkpoint and says where its names are known from. `published/*.txt`
has the names and shapes of a family: `{n}` stands for the numbers below n, and sizes are those of the configuration,
of its text part (t) or its vision part (v).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vlmrm.errors import CheckpointError
from vlmrm.modeling import checkpoint, load_for_training
from vlmrm.modeling.reward_model import reward_model_class

FOLDER = Path(__file__).parent / "published"
# What a reward model has no use for: the language head, and layers that predict further tokens.
LEFT_OUT = re.compile(r"(^|\.)lm_head\.|^mtp\.")
SMALL_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"vocab_size": 320, "pad_token_id": 0, "layer_types": None},
    **{"num_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
SMALL_VISION = {
    **{"hidden_size": 32, "intermediate_size": 56, "depth": 3, "num_hidden_layers": 3, "num_heads": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 64},
    **{"num_position_embeddings": 16, "position_embedding_size": 10},
}


@dataclass(frozen=True)
class Published:
    """A published checkpoint, of its real size or shrunk."""

    layout: str
    dtype: torch.dtype
    shards: int
    config: dict[str, Any]
    bytes: int | None  # of all weights, where they are published

    @classmethod
    def read(cls, name: str) -> Published:
        content = json.loads((FOLDER / f"{name}.json").read_text())
        dtype = getattr(torch, content["dtype"])
        return cls(content["layout"], dtype, content["shards"], content["config"], content.get("bytes"))

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    @property
    def tied(self) -> bool:
        return self.config.get("tie_word_embeddings", False)

    def shrunk(self, *, tied: bool) -> Published:
        config = json.loads(json.dumps(self.config)) | {"tie_word_embeddings": tied}
        for part, small in ((config.get("text_config", config), SMALL_TEXT), (config["vision_config"], SMALL_VISION)):
            part.update({key: value for key, value in small.items() if part.get(key) is not None})
        if "layer_types" in self.text:
            kinds = self.text["layer_types"]
            config["text_config"]["layer_types"] = [kinds[0], kinds[0], kinds[-1], kinds[-1]]
        return Published(self.layout, self.dtype, 3, config, None)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each weight by its published name."""
        kinds = self.text.get("layer_types", [])
        known: dict[str, Any] = {
            kind: [layer for layer, its in enumerate(kinds) if its == f"{kind}_attention"]
            for kind in ("full", "linear", "sliding")
        }
        known |= {"t": SimpleNamespace(**self.text), "v": SimpleNamespace(**self.config["vision_config"]), "len": len}
        known["config"] = SimpleNamespace(**self.config)
        shapes = {}
        for line in (FOLDER / f"{self.layout}.txt").read_text().splitlines():
            name, *sizes = line.split()
            if name.endswith("lm_head.weight") and self.tied:
                continue  # the embeddings are stored once
            shape = [eval(size, {"__builtins__": {}}, known) for size in sizes]
            before, braced, after = re.fullmatch(r"([^{]*)(?:{(.*)})?([^}]*)", name).groups()  # ty: ignore[unresolved-attribute]
            numbers = eval(braced, {"__builtins__": {}}, known) if braced else [""]
            for number in range(numbers) if isinstance(numbers, int) else numbers:
                shapes[f"{before}{number}{after}"] = shape
        return shapes

    def weights(self) -> dict[str, torch.Tensor]:
        """Return random weights, no two alike."""
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(shape, generator=generator).to(self.dtype) for name, shape in self.shapes().items()}

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
        """Write the checkpoint as it is published: in shards with an index."""
        (folder / "config.json").write_text(json.dumps(self.config))
        index = {}
        for shard in range(self.shards):
            file = f"model-{shard + 1:05}-of-{self.shards:05}.safetensors"
            part = {name: weights[name] for name in sorted(weights)[shard :: self.shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder


NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
ONE_OF_EACH = {Published.read(name).layout: name for name in reversed(NAMES)}.values()


@pytest.mark.parametrize("name", NAMES)
def test_every_published_weight_has_its_place(name, tmp_path):
    """At its real size on the meta device, by the library's own renaming, merging and tying of weights."""
    published = Published.read(name)
    shapes = published.shapes()
    if published.bytes is not None:
        assert published.dtype.itemsize * sum(map(math.prod, shapes.values())) == published.bytes
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = checkpoint.read_config(tmp_path)
    weights = {key: torch.empty(shape, dtype=published.dtype, device="meta") for key, shape in shapes.items()}
    model_class: Any = reward_model_class(config)
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        device_map={"": "meta"},
        dtype="auto",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    checkpoint._check_weights(name, model, report, new_head=True)
    assert report["missing_keys"] == {"score.weight"}
    used = sum(math.prod(shape) for key, shape in shapes.items() if not LEFT_OUT.search(key))
    state = model.state_dict()
    assert sum(weight.numel() for weight in state.values()) == used + state["score.weight"].numel()
    assert {weight.dtype for key, weight in state.items() if key != "score.weight"} == {published.dtype}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_published_layout_loads_byte_for_byte(name, tied, tmp_path):
    published = Published.read(name).shrunk(tied=tied)
    weights = published.weights()
    model = load_for_training(published.write(tmp_path, weights))
    written = {
        place_of(key): weight.transpose(-1, -2) if published.layout == "qwen3_vl_moe" and weight.ndim == 3 else weight
        for key, weight in weights.items()
        if not LEFT_OUT.search(key)
    }
    loaded = {place_of(key): weight for key, weight in model.state_dict().items() if key != "score.weight"}
    assert loaded.keys() == written.keys()
    for place, weight in loaded.items():
        assert weight.dtype == published.dtype and torch.equal(weight, written[place]), place
    assert model.score.weight.dtype == torch.float32


def place_of(name: str) -> tuple[Any, ...]:
    """Return what is left of a name, whatever its prefixes: its part of the model, its numbers, its last two words."""
    name = name.replace("model.language_model", "text").replace("language_model.model", "text")
    return bool(re.search("vis", name)), *re.findall(r"\d+", name), *name.split(".")[-2:]


def test_missing_tied_embeddings_are_not_made_up(tmp_path):
    published = Published.read("qwen2.5-vl-3b").shrunk(tied=True)
    weights = published.weights()
    del weights["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"lacks model\.language_model\.embed_tokens\.weight"):
        load_for_training(published.write(tmp_path, weights))
