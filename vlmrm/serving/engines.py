"""The classes that workers run for vlmrm's own rewards: a trained model, a reward of `vlmrm.rewards`, the decoder."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vlmrm.conversation import Conversation, Outcome
from vlmrm.data.media import media_round
from vlmrm.errors import CheckpointError, ConfigError, RowError, or_error
from vlmrm.formats.flow_factory import PROMPT_SLOT, PromptTemplate
from vlmrm.formats.openai import read_conversation
from vlmrm.formats.wire import Item, WireOutcome, write_outcome
from vlmrm.libraries import needs, parse_dtype
from vlmrm.modeling.manifest import SCALE
from vlmrm.outputs import ONE
from vlmrm.rendering import ProcessedMedia, Rendered
from vlmrm.rewards.registry import reward_arguments
from vlmrm.rewards.reward_set import Models
from vlmrm.rewards.samples import CallResult, required_columns, reward_items
from vlmrm.scoring.loading import SCORER_OPTIONS, load_local_scorer
from vlmrm.scoring.transforms import scale_for
from vlmrm.serving.media import conversation_of, read_npy, with_arrays, write_npy
from vlmrm.serving.preparing import MediaProcesses
from vlmrm.settings import did_you_mean


class ScorerEngine:
    """A model trained here. An item is a conversation that ends with the answer, or a sample that becomes one.

    `custom_prompt` and `system` are those of `PromptTemplate`, for samples; `cache_bytes` bounds what is kept for
    later answers to the same prompts; `processes` decode media, with 0 a thread. The score is that of `output`, by
    default the model's total. `options` are of `load_scorer`.
    """

    def __init__(
        self,
        *,
        custom_prompt: str = PROMPT_SLOT,
        system: Any = None,
        cache_bytes: int | None = None,
        processes: int = min(4, os.cpu_count() or 1),
        output: str | None = None,
        **options: Any,
    ):
        if unknown := options.keys() - SCORER_OPTIONS:
            known = (*SCORER_OPTIONS, "custom_prompt", "system", "processes", "output")
            choose = f": it takes {', '.join(known)}; a transform goes with each request."
            raise ConfigError(f"unknown option {min(unknown)}{did_you_mean(min(unknown), known, choose)}")
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 0:
            raise ConfigError(f"processes is {processes!r}: write a number of processes, or 0 for a thread.")
        self.processes = MediaProcesses(processes) if processes and sys.platform == "linux" else None
        self.scorer = load_local_scorer(**options, cache_bytes=cache_bytes)
        self.output = self.scorer.outputs.checked(output)
        if self.processes is not None and not self.processes.start(self.scorer.renderer):
            sys.stderr.write("images and videos are prepared in a thread: the processor has code of its own\n")
            self.processes = None
        self.template = PromptTemplate(custom_prompt, system)
        self._rendering = threading.Lock()  # a tokenizer has one caller at a time
        self.computed = {"tokens": 0, "pictures": 0}  # since it was loaded
        self._count_work(self.scorer.model)
        info = self.scorer.loaded.info
        self.info = {
            "kind": "conversations",
            "model": str(options["model"]),
            "checkpoint": self.scorer.loaded.digest,
            "cache_bytes": self.scorer.cache.limit,
            "prompts_kept": self.scorer.prompts_kept,
            **({} if self.scorer.outputs == ONE else {"outputs": self.scorer.outputs.described()}),
            **{name: info.get(name) for name in ("max_pixels", "chat_template_sha256")},
            **{name: scale_for(info, self.output).get(name) for name in SCALE},
        }

    def prepare(self, items: Sequence[Item]) -> list[Rendered | RowError]:
        """Return the items as tokens and pixels, or their errors; other threads may do so or `compute` meanwhile."""
        with media_round():
            rows = [or_error(conversation_of, item, self.template) for item in items]
            media = dict[str, ProcessedMedia]()
            if self.processes is not None:
                rows, media = self.processes.process(rows)
            rows = [or_error(self._with_media, row, media) for row in rows]
            with self._rendering:
                return self.scorer.rendered(rows, _raise_error, media)

    def compute(self, prepared: Sequence[Rendered | RowError]) -> list[WireOutcome]:
        return [self._outcome(values) for values in self.scorer.outputs_rendered(prepared)]

    def _outcome(self, values: dict[str, float] | RowError) -> WireOutcome:
        if isinstance(values, RowError):
            return {"error": values.reason}
        score = self.scorer.outputs.number(values, self.output)
        return {"score": score} if self.scorer.outputs == ONE else {"score": score, "extra": {"outputs": values}}

    def sleep(self) -> None:
        """Free the memory of the accelerator until `wake`: the weights wait in that of the machine."""
        self.scorer.clear_caches()
        self._device = next(self.scorer.model.parameters()).device
        self.scorer.model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.scorer.model.to(self._device)

    def _count_work(self, model: Any) -> None:
        """Have `computed` count the tokens of a model's forward passes, and the pictures and videos of its tower's."""
        run_tower = model.run_tower

        def counted(kind: str, media: Any) -> Any:
            self.computed["pictures"] += len(media["tokens"])
            return run_tower(kind, media)

        def count(model: Any, arguments: Any, inputs: Mapping[str, Any]) -> None:
            self.computed["tokens"] += inputs["input_ids"].numel()

        model.run_tower = counted
        model.register_forward_pre_hook(count, with_kwargs=True)

    def _with_media(self, row: Conversation | RowError, media: dict[str, ProcessedMedia]) -> Conversation:
        """Return the row, with what it shows in `media`; raises its error, or that of its media."""
        self.scorer.renderer.process(_raise_error(row).messages, media)
        return _raise_error(row)


def _raise_error(row: Conversation | RowError) -> Conversation:
    if isinstance(row, RowError):
        raise row
    return row


class RewardEngine:
    """A reward of `vlmrm.rewards` by its configuration; a groupwise one is called with the items of one `group`."""

    def __init__(self, **configuration: Any):
        [arguments] = reward_arguments(configuration)
        self.model = Models().reward(arguments).model
        self.info = {
            "kind": "samples",
            "model": arguments.reward_model,
            "required": [names[0] for names in required_columns(self.model) if len(names) == 1],
            "deterministic": self.model.deterministic,
        }

    def __call__(self, items: Sequence[Item]) -> list[WireOutcome]:
        groups = [("alone", index) if item.get("group") is None else item["group"] for index, item in enumerate(items)]
        result = reward_items(self.model, [or_error(_content, item) for item in items], groups)
        return [_outcome(result, index) for index in range(len(items))]


def _content(item: Item) -> Conversation | Mapping[str, Any]:
    return read_conversation(item["messages"]) if "messages" in item else with_arrays(item)


def _outcome(result: CallResult, index: int) -> WireOutcome:
    extra = json.loads(json.dumps(result.info.get(index, {}), default=str))  # numpy's numbers and the like as text
    if index in result.failures:
        return write_outcome(Outcome(error=result.failures[index], extra=extra))
    return write_outcome(Outcome(result.rewards[index], extra=extra))


class WanDecoder:
    """The decoder of video latents: an AutoencoderKLWan of diffusers, of Wan 2.1 (16 channels) or 2.2 (48).

    Latents are normalized as the diffusion model has them, by channel with the checkpoint's own mean and std. An item
    has `latents`, [C, T, H, W] as .npy; its outcome `extra["video"]`, frames uint8 [T', 3, H', W'] as .npy, and the
    seconds of decoding as `score`. As in cosmos-rl, values are clamped to [-1, 1] and truncated, not rounded. Videos
    are decoded one by one, so that none depends on its batch.
    """

    def __init__(self, model_path: str, subfolder: str = "", dtype: str = "bfloat16", device: str = ""):
        with needs("latents", "decoding latents"):
            from diffusers import AutoencoderKLWan
        weights = getattr(torch, parse_dtype(dtype))
        try:
            vae = AutoencoderKLWan.from_pretrained(
                model_path, subfolder=subfolder or None, torch_dtype=weights, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"there is no AutoencoderKLWan in {model_path}: {error}") from error
        self.vae: Any = vae.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        config = self.vae.config
        self.mean = torch.tensor(config.latents_mean).view(-1, 1, 1, 1)
        self.std = torch.tensor(config.latents_std).view(-1, 1, 1, 1)
        self.info = {
            "kind": "latents",
            "channels": config.z_dim,
            "spatial": config.scale_factor_spatial,
            "temporal": config.scale_factor_temporal,
        }

    def __call__(self, items: Sequence[Item]) -> list[WireOutcome]:
        return [self._outcome(read_npy(item["latents"])) for item in items]

    @torch.no_grad()
    def _outcome(self, latents: np.ndarray) -> WireOutcome:
        channels = len(self.mean)
        if latents.ndim != 4 or latents.shape[0] != channels:
            return {"error": f"its latents are {list(latents.shape)}, and the decoder's are [{channels}, T, H, W]"}
        if not np.isfinite(latents).all():
            return {"error": "its latents have values that are not finite"}
        started = time.perf_counter()
        raw = (torch.from_numpy(latents.astype(np.float32)) * self.std + self.mean).to(self.vae.device, self.vae.dtype)
        video = self.vae.decode(raw[None]).sample[0].float().clamp(-1, 1)
        frames = ((video + 1) / 2 * 255).to(torch.uint8).permute(1, 0, 2, 3).contiguous().cpu().numpy()
        return {"score": time.perf_counter() - started, "extra": {"video": write_npy(frames)}}
