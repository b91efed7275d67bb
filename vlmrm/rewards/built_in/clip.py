"""`CLIP`, `PickScore`, `PickScore_Rank` and `HPSv2`: the cosine of a prompt and an image in a CLIP model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from html import unescape
from importlib.util import find_spec
from typing import ClassVar

import torch
from accelerate import Accelerator, PartialState, init_empty_weights
from PIL import Image
from torch.nn.functional import normalize
from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode, pad, pil_to_tensor, resize
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerBase
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from vlmrm.data.media import media_key
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.libraries import missing
from vlmrm.modeling.published_weights import load_exactly, open_clip_to_transformers, pretrained, read_weights, shared
from vlmrm.rewards.built_in.views import FRAMES, views_of
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    RewardArguments,
    RewardModelOutput,
    choice,
)
from vlmrm.scoring.transforms import rank

logger = logging.getLogger("vlmrm")

HPS_V2_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class Truncation:
    """A tokenizer that truncates texts to the model's limit and warns the first time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int, model: str):
        self.tokenizer, self.limit, self.model = tokenizer, limit, model
        self.warned = False

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask` [N, tokens], padded on the right."""
        longest = max(len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"])
        if longest > self.limit and not self.warned:
            self.warned = True
            logger.warning(
                "a prompt has %d tokens: %s reads the first %d of each prompt (reported once)",
                longest,
                self.model,
                self.limit,
            )
        options = {"padding": True, "truncation": True, "max_length": self.limit, "padding_side": "right"}
        tokens = self.tokenizer(list(texts), return_tensors="pt", **options)
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}


class ClipTowers:
    """The text and image towers of a CLIP model.

    Args:
        model: in float32; it computes in `dtype`, but `scale`, exp(logit_scale), stays exact.
        prepare: maps images of any size to pixels [N, 3, H, W] as the model was trained with.
        name: the model in log messages.
    """

    def __init__(
        self,
        model: CLIPModel,
        tokenizer: PreTrainedTokenizerBase,
        prepare: Callable[[Sequence[Image.Image]], torch.Tensor],
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.scale = float(model.logit_scale.detach().exp())
        self.model = model.eval().requires_grad_(False).to(device, dtype)
        self.tokens = Truncation(tokenizer, model.text_model.config.max_position_embeddings, name)
        self.prepare = prepare
        self.lock = threading.Lock()

    @torch.inference_mode()
    def cosines(self, texts: Sequence[str], views: Sequence[Sequence[Image.Image]], batch_size: int) -> list[float]:
        """Return the mean cosine of each text with its images: one image, or frames of a video.

        Equal texts and equal images are computed once, so that they tie exactly.
        """
        distinct = list(dict.fromkeys(texts))
        keys_of_views = [[media_key(picture) for picture in view] for view in views]
        pictures = {
            key: picture
            for keys, view in zip(keys_of_views, views, strict=True)
            for key, picture in zip(keys, view, strict=True)
        }
        with self.lock:
            by_text = dict(zip(distinct, self._in_batches(self._texts, distinct, batch_size), strict=True))
            vectors = self._in_batches(self._images, list(pictures.values()), batch_size)
            by_picture = dict(zip(pictures, vectors, strict=True))
        return [
            float(torch.stack([by_picture[key] @ by_text[text] for key in keys]).mean())
            for text, keys in zip(texts, keys_of_views, strict=True)
        ]

    @torch.inference_mode()
    def image_directions(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """Return the unit vectors of images [N, D] in float32, on the CPU; equal images are computed once."""
        keys = [media_key(picture) for picture in images]
        distinct = dict(zip(keys, images, strict=True))
        with self.lock:
            vectors = self._in_batches(self._images, list(distinct.values()), batch_size)
        by_key = dict(zip(distinct, vectors, strict=True))
        return torch.stack([by_key[key] for key in keys])

    def _in_batches(self, embed: Callable[..., torch.Tensor], items: list, size: int) -> torch.Tensor:
        """Return unit vectors [N, D] in float32, on the CPU."""
        parts = [embed(items[start : start + size]).float().cpu() for start in range(0, len(items), size)]
        return normalize(torch.cat(parts), dim=-1)

    def _texts(self, texts: Sequence[str]) -> torch.Tensor:
        tokens = {name: value.to(self.model.device) for name, value in self.tokens(texts).items()}
        return self.model.get_text_features(**tokens).pooler_output

    def _images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        pixels = self.prepare(images).to(self.model.device, self.model.dtype)
        return self.model.get_image_features(pixel_values=pixels).pooler_output


def load_towers(path: str, processor: str, dtype: torch.dtype, device: torch.device) -> ClipTowers:
    """Load a transformers CLIP checkpoint, with the tokenizer and the image processor of `processor`.

    Images are resized by Pillow, as in the published code.

    Raises:
        CheckpointError: when one of them cannot be opened.
    """
    model = pretrained(CLIPModel, path, dtype=torch.float32)
    images = pretrained(CLIPImageProcessorPil, processor)

    def prepare(pictures: Sequence[Image.Image]) -> torch.Tensor:
        return images(list(pictures), return_tensors="pt")["pixel_values"]

    return ClipTowers(model, pretrained(AutoTokenizer, processor), prepare, path, dtype, device)


class _TwoTowers(BaseRewardModel):
    """Cosines of prompts with images or videos.

    Settings:
        model_name_or_path: a CLIP checkpoint, on the hub or in a folder.
        processor_name_or_path: where its tokenizer and image processor are.
        video_frames: `first` or `mean`, the mean cosine over all frames.
    """

    required_fields = ("prompt",)
    text_prompts = True
    options = ("model_name_or_path", "processor_name_or_path", "video_frames")
    published: ClassVar[str]
    published_processor: ClassVar[str | None] = None  # None: the model's own
    video_frames: ClassVar[str] = "mean"

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        path = str(config.extra_kwargs.get("model_name_or_path", self.published))
        self.frames = choice(config, "video_frames", self.video_frames, FRAMES)
        self.towers = self.load(path)
        self.model = self.towers.model

    def load(self, path: str) -> ClipTowers:
        """Return the model at `path`, shared with other rewards of this process."""
        processor = str(self.config.extra_kwargs.get("processor_name_or_path", self.published_processor or path))
        return shared(load_towers, path, processor, self.dtype, self.device)

    def text(self, prompt: str) -> str:
        """Return the prompt as it is tokenized."""
        return prompt

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
    ) -> RewardModelOutput:
        views = views_of(image, video, self.frames)
        cosines = self.towers.cosines([self.text(text) for text in prompt], views, self.config.batch_size)
        return RewardModelOutput(rewards=self.rewards(cosines), extra_info={"cosine": cosines})

    def rewards(self, cosines: Sequence[float]) -> list[float]:
        """Return the rewards of the cosines [N] of one call."""
        return list(cosines)


class CLIP(_TwoTowers, PointwiseRewardModel):
    """cos(text, image), in [-1, 1], not times 100 (Radford et al. 2021; CLIPScore, Hessel et al. 2021).

    The default is OpenAI's ViT-L/14. Of a video the first frame counts, as in Flow-Factory.
    """

    published = "openai/clip-vit-large-patch14"
    video_frames = "first"


class PickScore(_TwoTowers, PointwiseRewardModel):
    """exp(logit_scale) · cos(text, image) / 26, not clipped (Kirstain et al. 2023, Pick-a-Pic).

    The published score is not divided; 26 is Flow-Factory's.
    """

    default_dtype = "float32"  # as in Flow-Factory, whatever its configuration says
    published = "yuvalkirstain/PickScore_v1"
    published_processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def rewards(self, cosines: Sequence[float]) -> list[float]:
        return [self.towers.scale * cosine / 26 for cosine in cosines]


class PickScoreRank(_TwoTowers, GroupwiseRewardModel):
    """The share of the group with a lower PickScore: 0, 1/K, ... (K-1)/K; ties share their mean rank.

    From Flow-Factory, where ties get different rewards. It shares the weights of a `PickScore` in the same process.
    """

    default_dtype = PickScore.default_dtype
    published = PickScore.published
    published_processor = PickScore.published_processor

    def rewards(self, cosines: Sequence[float]) -> list[float]:
        return rank(cosines).tolist()


class HPSv2(_TwoTowers, PointwiseRewardModel):
    """cos(text, image) of open_clip's ViT-H/14 after training on preferences (Wu et al. 2023, HPSv2).

    Prompts are cleaned as by the published tokenizer: straight quotes for curly ones, no HTML entities. As in the
    published code the image is fitted into 224 by 224 by its longer side and padded with black; it is always resized
    with antialiasing, while that code depends on the torchvision it runs with. The weight file holds a `state_dict` in
    open_clip's names, as that code reads it; the file itself was not available to test.

    Settings:
        hps_version: `v2.1` or `v2.0`.
        model_name_or_path: the weight file, or the folder or hub repository that has it.
        base_name_or_path: its CLIP in transformers' layout, for the configuration and tokenizer.
        video_frames: `mean` over all frames of a video, or the `first`.
    """

    options = ("hps_version", "model_name_or_path", "base_name_or_path", "video_frames")
    published = "xswu/HPSv2"

    def load(self, path: str) -> ClipTowers:
        if find_spec("ftfy") is None:
            raise ConfigError(missing("the reward HPSv2", "ftfy", "rewards"))
        base = str(self.config.extra_kwargs.get("base_name_or_path", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"))
        version = choice(self.config, "hps_version", "v2.1", tuple(HPS_V2_FILES))
        return shared(_load_hps_v2, path, HPS_V2_FILES[version], base, self.dtype, self.device)

    def text(self, prompt: str) -> str:
        return cleaned(prompt)


def cleaned(prompt: str) -> str:
    """Return the prompt as open_clip's tokenizer cleans it; transformers' only strips spaces and case."""
    import ftfy

    return " ".join(unescape(unescape(ftfy.fix_text(prompt))).split()).lower()


def _load_hps_v2(path: str, name: str, base: str, dtype: torch.dtype, device: torch.device) -> ClipTowers:
    stored = read_weights(path, name)
    weights = stored.get("state_dict")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{name} of {path} has no state_dict in it: it is not HPSv2's weight file.")
    config = pretrained(CLIPConfig, base)
    with init_empty_weights(include_buffers=False):
        model = CLIPModel(config)
    load_exactly(model, open_clip_to_transformers(weights), f"{name} of {path}")
    size = config.vision_config.image_size

    def prepare(pictures: Sequence[Image.Image]) -> torch.Tensor:
        return torch.stack([_fitted(picture, size) for picture in pictures])

    return ClipTowers(model.float(), pretrained(AutoTokenizer, base), prepare, f"HPSv2 ({name})", dtype, device)


def _fitted(picture: Image.Image, size: int) -> torch.Tensor:
    """Return the image fitted into `size` by `size`, padded with black and normalised: [3, size, size]."""
    pixels = pil_to_tensor(picture) / 255
    scale = size / max(picture.size)
    height, width = round(picture.height * scale), round(picture.width * scale)
    pixels = resize(pixels, [height, width], InterpolationMode.BICUBIC, antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    pixels = pad(pixels, [left, top, size - width - left, size - height - top])
    return functional.normalize(pixels, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
