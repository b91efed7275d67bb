"""A family in small: its real classes with random weights, a tiny tokenizer and a chat template in its manner.

A family is one declaration, `Tiny`, which names what differs from the commonest shape: a language model of width 64
with two layers (one of each kind, where it has several), a vision tower of width 32 with two layers, and images of
28x28 in patches of 14x14.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, Qwen2Tokenizer

from vlmrm.modeling import tiny
from vlmrm.modeling.reward_model import reward_model_class

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "sliding_window": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 6,
    "rel_extent": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_layers": 2, "depth": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "embed_dim": 32, "out_hidden_size": 64,
    "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1],
    "num_position_embeddings": 16, "vision_use_head": False, "text_hidden_size": 64, "adapter_in_dim": 32,
    "adapter_out_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
# Of the pairs of rotary frequencies: how many turn with time, height and width.
SECTIONS = {8: [2, 3, 3], 4: [2, 1, 1], 2: [1, 1, 0]}
# The kinds of rotary positions, where their scale begins within the rows of the tests.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MULTIPLIERS = {"attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}  # Granite's

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"


@dataclass(frozen=True, eq=False)
class Tiny:
    """What a family's tiny checkpoint has beyond the commonest shape.

    Args:
        processor: makes the family's own processor of a tokenizer and a chat template.
        tokens: special tokens by the name under which the tokenizer has them; `<image>` is common to all.
        image, video: what the chat template writes for one; without `video` the family has none.
        turn: how it writes a message, with {role} and {content}; `start` comes before the first.
        config: what to change in the configuration, by sub-configuration.
        ids: the tokens of the configuration's token ids, beyond those of images and videos.
        codes: the tokens of the configuration's `vocabulary_map`, where images are words of a codebook.
        scatter: the standard deviation of what is added to each weight.
        options: what the processor's own call needs beside a text and its media.
        nested: whether that call takes a list of images for each text.
        padded: why its batches are padded, not shared.
        refused: why it cannot be a reward model here at all.
        needs: a package without which transformers does not make its model.
        lacks: cases that the family cannot have, and why.
    """

    model_type: str
    processor: Callable[[Any, str], Any] | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    image: str = "<image>"
    video: str | None = None
    turn: str = CHATML
    start: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    codes: Sequence[str] = ()
    scatter: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = True
    padded: str | None = None
    refused: str | None = None
    needs: str | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)

    def template(self) -> str:
        """Return the chat template as Jinja; a message's content is a string or a list of parts."""
        before, after = (json.dumps(text) for text in self.turn.replace("{role}", "\0").split("{content}"))
        before = before.replace("\\u0000", '" + message["role"] + "')
        parts = "".join(
            f'{{%- if part["type"] == "{kind}" -%}}{{{{- {json.dumps(written)} -}}}}{{%- endif -%}}'
            for kind, written in (("image", self.image), ("video", self.video))
            if written is not None
        )
        return (
            f"{{{{- {json.dumps(self.start)} -}}}}"
            "{%- for message in messages -%}"
            f"{{{{- {before} -}}}}"
            '{%- if message["content"] is string -%}{{- message["content"] -}}{%- else -%}'
            '{%- for part in message["content"] -%}'
            f'{{%- if part["type"] == "text" -%}}{{{{- part["text"] -}}}}{{%- endif -%}}{parts}'
            "{%- endfor -%}{%- endif -%}"
            f"{{{{- {after} -}}}}"
            "{%- endfor -%}"
        )

    def make_processor(self) -> Any:
        """Return the family's own processor, around the tiny tokenizer with the family's special tokens."""
        bpe = json.loads(_base_tokenizer().backend_tokenizer.to_str())["model"]
        tokenizer = Qwen2Tokenizer(
            vocab=bpe["vocab"],
            merges=[tuple(merge) for merge in bpe["merges"]],
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            bos_token=None,
            extra_special_tokens={
                "im_start_token": "<|im_start|>",
                "image_token": "<image>",
                **self.tokens,
                **{f"code{i}": token for i, token in enumerate(self.codes)},
            },
            model_max_length=4096,
        )
        processor = self.processor(tokenizer, self.template())
        if getattr(processor, "chat_template", None) is None:  # not every processor's constructor takes one
            processor.chat_template = self.template()
        return processor

    def make_config(self, processor: Any) -> PreTrainedConfig:
        """Return the family's configuration, shrunk: the commonest sizes where it has them, and then its own."""
        make = CONFIG_MAPPING[self.model_type]
        default, tokenizer = make(), processor.tokenizer
        values = _shrunk(default, {} if "text_config" in default.sub_configs else TEXT)
        text = default.get_text_config()
        vocabularies = [name for name in ("vocab_size", "vocab_size_per_layer_input") if _get(text, name) is not None]
        values.get("text_config", values).update(dict.fromkeys(vocabularies, len(tokenizer)))
        for kind in ("image", "video"):
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                if hasattr(default, name) and isinstance(token := getattr(processor, f"{kind}_token_id", None), int):
                    values[name] = token
        values |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in self.ids.items()}
        if self.codes:
            values["vocabulary_map"] = {token: tokenizer.convert_tokens_to_ids(token) for token in self.codes}
        return make(**_merged(values, self.config))

    def make_model(self, processor: Any) -> Any:
        """Return the reward model in float64, on the CPU, with equal weights in every process."""
        config = self.make_config(processor)
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = reward_model_class(config)(config).double().eval()
        model.model.set_experts_implementation("eager")  # the kernels of grouped products do not take float64
        with torch.no_grad():
            for weight in model.parameters():
                # Gates and scales begin at zero or one, and then hide what they multiply.
                weight.add_(self.scatter * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        return model


@cache
def _base_tokenizer() -> Qwen2Tokenizer:
    return tiny._tokenizer()


def _get(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer to what differs between layers
        return None


def _shrunk(config: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that the configuration has, with the lists that go with a smaller number of layers.

    So too for its sub-configurations, those of the language model in its sizes and all others in those of a tower.
    """
    shrunk = {
        name: size
        for name, size in sizes.items()
        if _get(config, name) is not None or (name == "head_dim" and "head_dim" in config.__dict__)
    }
    types = {name: kinds for name in ("layer_types", "mlp_layer_types") if (kinds := _kinds(config, name))}
    if types:
        layers = shrunk["num_hidden_layers"] = max(2, *map(len, types.values()))
        shrunk |= {name: (kinds * layers)[:layers] for name, kinds in types.items()}
    rotary = _get(config, "rope_parameters")
    if isinstance(rotary, dict) and "mrope_section" in rotary:
        pairs = int(shrunk["head_dim"] * rotary.get("partial_rotary_factor", 1)) // 2
        shrunk["rope_parameters"] = {**rotary, "mrope_section": SECTIONS[pairs]}
    for name in config.sub_configs:
        if (part := _get(config, name)) is not None:
            sizes = TEXT if name == "text_config" else VISION
            shrunk[name] = {"model_type": part.model_type, **_shrunk(part, sizes)}
    return shrunk


def _kinds(config: PreTrainedConfig, name: str) -> list[str]:
    """Return each kind of layers once."""
    return list(dict.fromkeys(_get(config, name) or ()))


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values with those of `changes` instead; dictionaries are merged, and so on down."""
    merged = copy.deepcopy(dict(values))
    for name, change in (changes or {}).items():
        before = merged.get(name)
        merged[name] = (
            _merged(before, change) if isinstance(before, dict) and isinstance(change, dict) else copy.deepcopy(change)
        )
    return merged
