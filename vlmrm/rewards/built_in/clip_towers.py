"""What CLIP, PickScore and HPSv2 share: a text and an image tower, and the cosine between what they make."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch.nn.functional import normalize
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerBase

from vlmrm.data.media import media_key
from vlmrm.errors import RewardError
from vlmrm.rewards.built_in.weights import pretrained

logger = logging.getLogger("vlmrm")

FRAMES = ("first", "mean")


class Truncation:
    """Texts as tokens, cut where the model ends; the first time that happens a line says so."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int, model: str):
        self.tokenizer, self.limit, self.model = tokenizer, limit, model
        self.said = False

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` [N, tokens], padded on the right."""
        whole = max(len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"])
        if whole > self.limit and not self.said:
            self.said = True
            logger.warning(
                "a prompt has %d tokens; %s reads the first %d of each and no more is said",
                whole,
                self.model,
                self.limit,
            )
        options = {"padding": True, "truncation": True, "max_length": self.limit, "padding_side": "right"}
        tokens = self.tokenizer(list(texts), return_tensors="pt", **options)
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}


class ClipTowers:
    """A CLIP model as cosines of texts and images.

    Args:
        model: in float32; it computes in `dtype`, but `scale`, exp(logit_scale), stays exact.
        prepare: images of any size → pixels [N, 3, H, W] as the model was trained with.
        name: what a line in the log calls the model.
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
        """For each text, its mean cosine with the pictures it has: one image, or frames of a video.

        Equal texts and equal pictures are computed once, so that they tie exactly.
        """
        distinct = list(dict.fromkeys(texts))
        shown = [[media_key(picture) for picture in view] for view in views]
        pictures = {
            key: picture
            for keys, view in zip(shown, views, strict=True)
            for key, picture in zip(keys, view, strict=True)
        }
        with self.lock:
            by_text = dict(zip(distinct, self._in_batches(self._texts, distinct, batch_size), strict=True))
            vectors = self._in_batches(self._images, list(pictures.values()), batch_size)
            by_picture = dict(zip(pictures, vectors, strict=True))
        return [
            float(torch.stack([by_picture[key] @ by_text[text] for key in keys]).mean())
            for text, keys in zip(texts, shown, strict=True)
        ]

    def _in_batches(self, embed: Callable[..., torch.Tensor], items: list, size: int) -> torch.Tensor:
        """Unit vectors [N, D] in float32, on the CPU."""
        parts = [embed(items[start : start + size]).float().cpu() for start in range(0, len(items), size)]
        return normalize(torch.cat(parts), dim=-1)

    def _texts(self, texts: Sequence[str]) -> torch.Tensor:
        tokens = {name: value.to(self.model.device) for name, value in self.tokens(texts).items()}
        return self.model.get_text_features(**tokens).pooler_output

    def _images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        pixels = self.prepare(images).to(self.model.device, self.model.dtype)
        return self.model.get_image_features(pixel_values=pixels).pooler_output


def load_towers(path: str, processor: str, dtype: torch.dtype, device: torch.device) -> ClipTowers:
    """A transformers CLIP checkpoint, with the tokenizer and the image processor of `processor`.

    Images are resized by Pillow, as in the published code.

    Raises:
        CheckpointError: when one of them cannot be opened.
    """
    model = pretrained(CLIPModel, path, dtype=torch.float32)
    images = pretrained(CLIPImageProcessorPil, processor)

    def prepare(pictures: Sequence[Image.Image]) -> torch.Tensor:
        return images(list(pictures), return_tensors="pt")["pixel_values"]

    return ClipTowers(model, pretrained(AutoTokenizer, processor), prepare, path, dtype, device)


def views_of(
    image: Sequence[Image.Image] | None, video: Sequence[Sequence[Image.Image]] | None, frames: str
) -> list[Sequence[Image.Image]]:
    """The pictures of each sample: its image, or the first frame or all frames of its video.

    Raises:
        RewardError: when there are both or neither.
    """
    if image is not None and video is not None:
        raise RewardError("there are images and videos, and one of them is to be rewarded: give one.")
    if image is not None:
        return [[picture] for picture in image]
    if video is None:
        raise RewardError("there is neither an image nor a video to reward: give one.")
    return [clip[:1] if frames == "first" else clip for clip in video]
