"""`CLIP`, `PickScore`, `PickScore_Rank`, `HPSv2`: cosines of prompts and images; `aesthetic`: a head over CLIP."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from html import unescape
from importlib.util import find_spec
from typing import ClassVar

import torch
from accelerate import init_empty_weights
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode, pad, pil_to_tensor, resize
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerBase
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from vlmrm.data.media import media_key
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.libraries import missing
from vlmrm.modeling.published_weights import open_clip_to_transformers, pretrained, read_weights, shared
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    Processes,
    RewardArguments,
    RewardModelOutput,
    choice,
)
from vlmrm.rewards.pictures import FRAMES, once_each, views_of
from vlmrm.scoring.transforms import rank
from vlmrm.weights import load_exactly

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
    """The text and image towers of a CLIP model, by its `name` in the log.

    The model is given in float32 and computes in `dtype`, but `scale`, exp(logit_scale), stays exact. `prepare` maps
    images of any size to pixels [N, 3, H, W] as the model was trained with.
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
        """Return the mean cosine of each text with its images: one image, or frames of a video."""
        pictures = [picture for view in views for picture in view]
        with self.lock:
            of_texts = once_each(texts, texts, lambda some: self._in_batches(self._texts, some, batch_size))
            of_pictures = iter(self._of_pictures(pictures, batch_size))
        return [
            float(torch.stack([next(of_pictures) @ text for _ in view]).mean())
            for text, view in zip(of_texts, views, strict=True)
        ]

    @torch.inference_mode()
    def image_directions(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """Return the unit vectors of images [N, D] in float32, on the CPU."""
        with self.lock:
            return torch.stack(self._of_pictures(images, batch_size))

    def _of_pictures(self, pictures: Sequence[Image.Image], size: int) -> list[torch.Tensor]:
        return once_each(map(media_key, pictures), pictures, lambda some: self._in_batches(self._images, some, size))

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
    """
    model = pretrained(CLIPModel, path, dtype=torch.float32)
    images = pretrained(CLIPImageProcessorPil, processor)

    def prepare(pictures: Sequence[Image.Image]) -> torch.Tensor:
        return images(list(pictures), return_tensors="pt")["pixel_values"]

    return ClipTowers(model, pretrained(AutoTokenizer, processor), prepare, path, dtype, device)


class _TwoTowers(BaseRewardModel):
    """Cosines of prompts with images or videos."""

    required_fields = ("prompt",)
    text_prompts = True
    options = ("model_name_or_path", "processor_name_or_path", "video_frames")
    published: ClassVar[str]
    published_processor: ClassVar[str | None] = None  # None: the model's own
    video_frames: ClassVar[str] = "mean"

    def __init__(self, config: RewardArguments, accelerator: Processes):
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
        self, prompt: list[str], image: list[Image.Image] | None = None, video: list[list[Image.Image]] | None = None
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

    Prompts are cleaned as by the published tokenizer, and images fitted into 224 by 224 and padded with black; they
    are always resized with antialiasing, which in the published code depends on torchvision.
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


WIDTHS = (1024, 128, 64, 16, 1)  # of the head's layers, without activations between them
PREFIX = "layers."
DROPOUTS = 3  # after the first layers; they do nothing here, and their numbers are in the names of the weights


class Aesthetic(PointwiseRewardModel):
    """About 1 to 10, the rating that people would give (Schuhmann et al. 2022, arXiv:2210.08402; LAION's predictor).

    Linear layers over the direction of CLIP's image embedding, as DDPO and Flow-GRPO use them. The head computes in
    float32, whatever `dtype` is.
    """

    required_fields = ()
    options = ("head_path", "model_name_or_path", "video_frames")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        head = config.extra_kwargs.get("head_path")
        if not head:
            raise ConfigError(f"reward {config.name}: head_path is missing: give the file of the head's weights.")
        self.frames = choice(config, "video_frames", "mean", FRAMES)
        path = str(config.extra_kwargs.get("model_name_or_path", CLIP.published))
        self.towers = shared(load_towers, path, path, self.dtype, self.device)
        self.model = self.towers.model
        self.head = load_head(str(head), self.model.config.projection_dim)

    @torch.inference_mode()
    def __call__(  # ty: ignore[incompatible-method-override]
        self, image: list[Image.Image] | None = None, video: list[list[Image.Image]] | None = None
    ) -> RewardModelOutput:
        views = views_of(image, video, self.frames)
        pictures = [picture for view in views for picture in view]
        ratings = self.head(self.towers.image_directions(pictures, self.config.batch_size)).squeeze(-1)
        parts = ratings.split([len(view) for view in views])
        return RewardModelOutput([float(part.mean()) for part in parts])


def load_head(path: str, width: int) -> nn.Sequential:
    """Return the head over embeddings of so many numbers, in float32."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip((width, *WIDTHS), WIDTHS, strict=False)):
        layers += [nn.Linear(inputs, outputs), *([nn.Identity()] if number < DROPOUTS else [])]
    head = nn.Sequential(*layers)
    load_exactly(head, {name.removeprefix(PREFIX): weight for name, weight in read_weights(path).items()}, path)
    return head.float().eval()
