"""What the own calls of processors do beyond the steps that rendering takes: media to pixels, then their text.

A processor's call reads a whole conversation; rendering reads each image once, whichever conversations show it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from transformers import ProcessorMixin

from vlmrm.errors import RowError
from vlmrm.libraries import relies_on

for _name in ("MiniCPMV4_6Processor", "MiniCPMV4_7Processor", "MiniCPMOcrProcessor"):
    if hasattr(transformers, _name):  # older versions lack some
        relies_on(getattr(transformers, _name), "_prepend_local_ids")


def template_token(processor: Any, kind: str) -> str | None:
    """Return the token that a chat template writes for an image or a video; None where the processor names none."""
    return getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)


def process_one(
    processor: Any, kind: str, medium: Any, defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return the outputs for one medium, and the text that stands for it in a conversation.

    `defaults` are the options of the processor's own call, by the kind of its parts.
    """
    step = processor._process_images if kind == "image" else processor._process_videos
    named = [p.name for p in inspect.signature(step).parameters.values() if p.kind is not p.VAR_KEYWORD]
    of_kind = {**defaults[f"{kind}s_kwargs"], **options, "return_tensors": "pt"}
    if "processed_audio" in named:  # omni models take the options of all kinds for a video
        of_call = {**defaults, f"{kind}s_kwargs": of_kind}
    else:
        of_call = {name: value for name, value in defaults.items() if name in named} | of_kind
    if _is(processor, "Idefics2Processor"):  # which writes what stands for images in its call
        tiles = 5 if processor.image_processor.do_image_splitting else 1
        fake, tokens = processor.fake_image_token, processor.image_token * processor.image_seq_len
        return dict(processor.image_processor([[medium]], **of_call)), f"{fake}{tokens}{fake}" * tiles
    try:
        outputs, replacements = step([medium], **of_call)
    except KeyError as error:  # Nemotron-H Omni's text of a video needs what its call alone knows
        raise ValueError(f"{type(processor).__name__} needs {error} for one apart from its conversation") from error
    if _is(processor, "InternVLProcessor"):
        outputs.pop("num_patches", None)
        if kind == "video":  # its model takes the frames of videos as images
            outputs = {"pixel_values": outputs["pixel_values_videos"].flatten(0, 1)}
    if _is(processor, "PerceptionLMProcessor") and kind == "image":
        outputs["pixel_values"] = outputs["pixel_values"].transpose(0, 1)  # tiles first: images have more and fewer
    unused = {*processor.unused_input_names, "rows", "cols"}  # the calls of Idefics 3 and its heirs drop these two
    return {name: value for name, value in outputs.items() if name not in unused}, replacements[0]


def expanded(processor: Any, text: str, replacements: Mapping[str, Sequence[str]]) -> str:
    """Return a rendered text with what stands for each image and each video."""
    images, videos = list(replacements["image"]), list(replacements["video"])
    if len(images) > 1 and "batch_num_images" in processor.model_input_names:
        raise RowError(f"{type(processor).__name__} reads several images of a conversation coarsely: show it one")
    if getattr(processor, "default_use_image_id", False):  # MiniCPM-V counts the images of a conversation
        images = processor._prepend_local_ids([text], images, processor.image_token)
        videos = processor._prepend_local_ids([text], videos, processor.video_token)
    if _is(processor, "Molmo2Processor"):  # its templates do not write this
        begin = processor.tokenizer.bos_token or processor.tokenizer.eos_token
        text = text if text.startswith(begin) else begin + text
    texts, _ = processor.get_text_with_replacements([text], images, videos)
    if _is(processor, "Idefics2Processor"):  # one token stands between two images, and a space before a word
        fake = re.escape(processor.fake_image_token)
        return re.sub(f"{fake}(?=[^\\s<])", f"{processor.fake_image_token} ", re.sub(fake * 2, fake, texts[0]))
    return texts[0]


def type_ids(processor: Any, ids: Sequence[int]) -> list[int]:
    """Return the kind of each token: text 0, image 1, video 2."""
    if _is(processor, "Idefics3Processor"):  # its own method needs the lengths of its images
        return ProcessorMixin.create_mm_token_type_ids(processor, [list(ids)])[0]
    return processor.create_mm_token_type_ids([ids])[0]


def _is(processor: Any, name: str) -> bool:
    """Return whether a processor is of the class `name`: older versions of transformers may not have the class."""
    return any(parent.__name__ == name for parent in type(processor).__mro__)
