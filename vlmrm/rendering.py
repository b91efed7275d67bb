"""A conversation → token ids and pixels, by the model's own processor and chat template.

Each distinct image or video is decoded and processed once, under a key; a conversation then becomes token ids with
the processed media. Nothing here knows about batches, pairs or scores.

Only the chat template writes control tokens. One in a text, such as `<|im_end|>`, is tokenized as plain characters:
otherwise an answer could end its own turn and write the next one.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from jinja2 import TemplateError
from safetensors import safe_open
from safetensors.torch import save
from transformers import ProcessorMixin
from transformers.image_utils import SizeDict

from vlmrm.conversation import Conversation, Image, Medium, Message, Messages, Part, Text, Video, media_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.media import media_key, open_image, open_video
from vlmrm.errors import CheckpointError, ConfigError, MediaError, RowError
from vlmrm.files import write_file
from vlmrm.libraries import relies_on

logger = logging.getLogger("vlmrm")

relies_on(
    ProcessorMixin,
    *("_process_images", "_process_videos", "_merge_kwargs", "get_text_with_replacements", "create_mm_token_type_ids"),
    "unused_input_names",
)

PATCH_VALUES = 3 * 14 * 14  # of a usual patch, where a processor returns pictures instead of patches
ANSWER = "\uf8ff"  # stands for any answer
PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters to which Unicode assigns no meaning


@dataclass(frozen=True)
class ProcessedMedia:
    """An image or video as the model's input."""

    key: str
    kind: str
    # The processor's outputs for it alone: `pixel_values` [patches, dim], `image_grid_thw` [1, 3], ...
    tensors: dict[str, torch.Tensor]
    replacement: str  # the text that represents it in the rendered conversation
    ids: Sequence[int]  # the tokens of that

    @property
    def encoded_as(self) -> str:
        """The kind as which the model encodes it: to SmolVLM a video is images."""
        return "video" if any("video" in name for name in self.tensors) else "image"

    @property
    def patches(self) -> int:
        """Estimate the number of patches that the vision tower computes."""
        rows = max((len(tensor) for tensor in self.tensors.values() if tensor.ndim < 3), default=0)
        values = sum(tensor.numel() for tensor in self.tensors.values() if tensor.ndim > 3)
        return max(rows, values // PATCH_VALUES)


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens, with its media in reading order."""

    input_ids: list[int]
    # `mm_token_type_ids`: text 0, image 1, video 2. Without it Qwen's models silently have one-dimensional positions.
    type_ids: list[int]
    media: tuple[ProcessedMedia, ...] = ()
    prompt: int = 0  # the number of tokens before the answer; 0 where nobody asked
    others: tuple[Rendered, ...] = ()  # the conversation in the model's further branches
    taught: int = 0  # how many of its last tokens are a critique, which the model learns to write

    def __len__(self) -> int:
        return max(len(it.input_ids) for it in (self, *self.others))

    @property
    def branches(self) -> list[Rendered]:
        """The conversation in each branch of the model; one with other tokens before the answer knows no prompt."""
        before, count = self.input_ids[: self.prompt], self.prompt
        others = [replace(it, prompt=count * (it.input_ids[:count] == before)) for it in self.others]
        return [replace(self, others=()), *others]


@dataclass
class MediaLimits:
    """Limits of the size of images, None for the processor's own; the sampling of videos, None for the default."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    video_max_frames: int | None = None

    @classmethod
    def of(cls, arguments: DataArguments) -> MediaLimits:
        return cls(arguments.min_pixels, arguments.max_pixels, arguments.video_fps, arguments.video_max_frames)


@dataclass
class Renderer:
    """Renders conversations with one processor. Safe to send to DataLoader workers."""

    processor: Any
    limits: MediaLimits = field(default_factory=MediaLimits)
    store: Store | None = None  # where processed media are kept beyond the caller's own cache
    written: Sequence[str] = ()  # control tokens that texts may contain, of a model that was trained on such texts
    by_content: bool = False  # name media by what is in their files, not by their paths, for stores that outlive these
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, where the training had others
    branches: Sequence[str | None] = (None,)  # of the model, `Outputs.branches`

    def __post_init__(self):
        if not getattr(self.processor, "chat_template", None):
            raise CheckpointError(
                f"{type(self.processor).__name__} has no chat template: use an instruction-tuned checkpoint, or put a "
                "chat_template.jinja into its folder."
            )
        added = self.tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in added if token.special}
        self.special, self.control = _any_of(tokens), _any_of(tokens - set(self.written))

    @property
    def tokenizer(self):
        return self.processor.tokenizer

    def process(
        self, messages: Sequence[Message], cache: dict[str, ProcessedMedia] | None = None
    ) -> list[ProcessedMedia]:
        """Open and process the media of `messages`, in reading order, using and filling `cache`."""
        cache = {} if cache is None else cache
        processed = []
        for medium in media_of(messages):
            key = self.key(medium)
            if key not in cache:
                cache[key] = self._load_or_process(medium, key)
            processed.append(cache[key])
        return processed

    def key(self, medium: Medium) -> str:
        """Return the cache key of a medium: media with equal keys have equal pixels."""
        options = medium.options.as_dict() if isinstance(medium, Video) else {}
        key = media_key(medium.reference, by_content=self.by_content)
        return f"{medium.kind}:{key}:{sorted(options.items()) if options else ''}"

    def _load_or_process(self, medium: Medium, key: str) -> ProcessedMedia:
        media = None if self.store is None else self.store.get(key)
        if media is None:
            media = self._process_video(medium, key) if isinstance(medium, Video) else self._process_image(medium, key)
            if self.store is not None:
                self.store.put(key, media)
        return media

    def _process_image(self, medium: Image, key: str) -> ProcessedMedia:
        return self._process_one(open_image(medium.reference), medium.reference, key, "image", self._image_size())

    def process_tensors(self, images: torch.Tensor) -> list[ProcessedMedia]:
        """Process images [N, 3, H, W] in [0, 1] as `process` does, by differentiable operations.

        They are resized by the same rule and filter, bicubic with antialiasing and clamped. The processor also rounds
        to 8 bits and clamps between the two axes, so its pixels differ by less than half a level of 255 on average,
        and by a few levels at edges of black and white.
        """
        processor = self.processor.image_processor
        size = SizeDict(**(self._image_size().get("size") or dict(processor.size)))
        factor = processor.patch_size * processor.merge_size
        try:
            resized = processor.resize(images, size=size, resample=processor.resample, factor=factor)
        except ValueError as error:
            raise MediaError(f"the model cannot take the images {tuple(images.shape)}: {error}") from error
        options = {"do_resize": False, "do_rescale": False}
        return [
            self._process_one(image, "a tensor", f"tensor:{index}", "image", options)
            for index, image in enumerate(resized.clamp(0, 1))
        ]

    def _process_video(self, medium: Video, key: str) -> ProcessedMedia:
        frames, metadata = open_video(medium, self.limits.video_fps, self.limits.video_max_frames)
        options = {"video_metadata": [metadata], "do_sample_frames": False, "return_metadata": True}
        return self._process_one(frames, medium.reference, key, "video", options)

    def _process_one(
        self, medium: Any, reference: Any, key: str, kind: str, options: dict[str, Any]
    ) -> ProcessedMedia:
        # For a single medium, so that it is processed once, however many conversations share it.
        try:
            outputs, replacement = process_one(self.processor, kind, medium, self._defaults, options)
        except ValueError as error:  # the library's own limits, such as the aspect ratio
            raise MediaError(f"the model cannot take the {kind} {_name(reference)}: {error}") from error
        tensors = {name: torch.as_tensor(value) for name, value in outputs.items() if name != "video_metadata"}
        ids = self.tokenizer(replacement, add_special_tokens=False)["input_ids"]
        return ProcessedMedia(key, kind, tensors, replacement, ids)

    @cached_property
    def _defaults(self) -> dict[str, dict[str, Any]]:
        """The options that the processor's own call would use, by the kind of its parts."""
        processor = self.processor
        return processor._merge_kwargs(processor.valid_processor_kwargs, self.tokenizer.init_kwargs)

    def _image_size(self) -> dict[str, Any]:
        limits = self.limits.min_pixels, self.limits.max_pixels
        return {} if limits == (None, None) else {"size": limited_size(self.processor, *limits)}

    def text(self, messages: Sequence[Message], branch: str | None = None) -> str:
        """Return `messages` through the chat template, in a branch, with a placeholder for each image or video."""
        template = self.processor.chat_template
        try:
            return self.processor.apply_chat_template(
                [_for_template(message) for message in messages],
                # By name: SmolVLM takes another for videos, which leaves out the messages without one.
                chat_template=template if isinstance(template, str) else None,
                tokenize=False,
                add_generation_prompt=False,
                **(self.variables if branch is None else {**self.variables, "output": branch}),
            )
        except TemplateError as error:
            raise RowError(f"the chat template does not take it: {error}") from error

    def render(self, conversation: Conversation, cache: dict[str, ProcessedMedia] | None = None) -> Rendered:
        """Return a conversation as tokens and media."""
        return self.render_with(conversation, self.process(conversation.messages, cache))

    def render_with(self, conversation: Conversation, media: Sequence[ProcessedMedia]) -> Rendered:
        """Do `render` with media that are already processed, in reading order."""
        marked = self._marked(conversation.messages)
        first, *others = [self._branch(*marked, media, branch) for branch in self.branches]
        return replace(first, others=tuple(others))

    def _branch(
        self, messages: Messages, marks: Mapping[str, str], media: Sequence[ProcessedMedia], branch: str | None
    ) -> Rendered:
        text = self.text(messages, branch)
        replacements = {kind: [item.replacement for item in media if item.kind == kind] for kind in ("image", "video")}
        for kind, texts in replacements.items():
            # What a template writes for an image or a video; not every processor names it.
            names = (f"{kind}_placeholder_token", f"{kind}_token")
            token = next((it for name in names if (it := getattr(self.processor, name, None))), None)
            if token is not None and text.count(token) != len(texts):
                raise RowError(
                    f"the rendered text has {text.count(token)} {token} for {len(texts)} {kind}s: a text of this row "
                    "contains that token; remove it"
                )
        ids = self._token_ids(expanded(self.processor, text, replacements), marks)
        return Rendered(ids, type_ids(self.processor, ids), tuple(media))

    def prompt_tokens(self, conversation: Conversation, rendered: Rendered) -> int:
        """Return how many of a conversation's tokens, `rendered`, stand before its answer whatever that is."""
        prompt = conversation.prompt
        messages, marks = self._marked((*prompt, Message(conversation.messages[-1].role, (Text(ANSWER),))))
        try:
            text = self.text(messages, self.branches[0]).rpartition(ANSWER)[0]
        except RowError:  # its answers are pictures alone
            text = self.text(messages[:-1], self.branches[0])
        media = rendered.media[: len(media_of(prompt))]
        replacements = {kind: [item.replacement for item in media if item.kind == kind] for kind in ("image", "video")}
        ids = self._token_ids(expanded(self.processor, text, replacements), marks)
        pairs = zip(ids, rendered.input_ids[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(rendered) - 1))

    def _marked(self, messages: Messages) -> tuple[Messages, dict[str, str]]:
        """Return the messages with a private-use character for each control token in a text, and the tokens by it."""
        # Else a text that quotes <|im_end|> would end its turn, and could speak for another role.
        for message in messages:
            if match := self.control.search(message.role):
                raise RowError(f"the role {message.role!r:.60} holds {match[0]}: write user, assistant or system")
        # Templates write adjacent parts without a separator, so two texts may form a token together.
        joined = [_joined(message) for message in messages]
        texts = [part.text for message in joined for part in message.content if isinstance(part, Text)]
        tokens = sorted({token for text in texts for token in self.control.findall(text)})
        if not tokens:
            return messages, {}
        free = (chr(code) for code in PRIVATE_USE if not any(chr(code) in text for text in texts))
        marks = dict(zip(tokens, free, strict=False))
        if len(marks) < len(tokens):
            raise RowError(f"its texts hold {tokens[-1]} and every private-use character of Unicode: remove some")

        def marked(part: Part) -> Part:
            return Text(self.control.sub(lambda match: marks[match[0]], part.text)) if isinstance(part, Text) else part

        changed = tuple(Message(message.role, tuple(map(marked, message.content))) for message in joined)
        return changed, {mark: token for token, mark in marks.items()}

    def _token_ids(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """Return the tokens of a rendered text; a marked control token is tokenized as plain text."""
        if not marks:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        # A tokenizer itself splits at special tokens first and then tokenizes each piece between them.
        for index, piece in enumerate(self.special.split(text)):
            if index % 2:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                ids += self._ids_of_text(piece.translate(str.maketrans(dict(marks))))
        # More than in the template means that this tokenizer ignores `split_special_tokens`.
        for token in marks.values():
            if ids.count(self.tokenizer.convert_tokens_to_ids(token)) > text.count(token):
                raise RowError(f"a text holds {token}, which this tokenizer cannot read as characters: remove it")
        return ids

    def _ids_of_text(self, text: str) -> list[int]:
        return self._plain_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    @cached_property
    def _plain_tokenizer(self) -> Any:
        # A copy, as splitting control tokens changes the state of a tokenizer, which other threads may be using.
        return copy.deepcopy(self.tokenizer)

    def trim(self, conversation: Conversation, max_length: int, cache: dict[str, ProcessedMedia]) -> Rendered | None:
        """Render the conversation with the end of its last text cut, so that there are at most `max_length` tokens.

        The chat template's closing tokens stay. Return None when the last part is not a text, or is too short.
        """
        rendered = self.render(conversation, cache)
        while len(rendered) > max_length:
            *before, last = conversation.messages
            if not last.content or not isinstance(cut := last.content[-1], Text):
                return None
            ids = self._ids_of_text(cut.text)
            keep = len(ids) - (len(rendered) - max_length)
            if keep <= 0:
                return None
            # A cut inside a character decodes to the replacement character.
            shorter = Text(self.tokenizer.decode(ids[:keep]).rstrip("\ufffd"))
            conversation = Conversation((*before, Message(last.role, (*last.content[:-1], shorter))))
            rendered = self.render(conversation, cache)
        return rendered


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    # The longest first, as one token may be the beginning of another; `(?!)` never matches.
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")


def _joined(message: Message) -> Message:
    """Return the message with adjacent texts joined."""
    joined: list[Part] = []
    for part in message.content:
        if isinstance(part, Text) and joined and isinstance(last := joined[-1], Text):
            joined[-1] = Text(last.text + part.text)
        else:
            joined.append(part)
    return Message(message.role, tuple(joined))


def _for_template(message: Message) -> dict[str, Any]:
    # Templates of text models, and those of other models for system turns, only take plain strings.
    if not message.media:
        return {"role": message.role, "content": message.text}
    parts = [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": p.kind} for p in message.content]
    return {"role": message.role, "content": parts}


def _name(reference: Any) -> str:
    return reference if isinstance(reference, str) and len(reference) < 300 else type(reference).__name__


class Store(Protocol):
    """Where processed media are kept by their keys."""

    def get(self, key: str) -> ProcessedMedia | None: ...

    def put(self, key: str, media: ProcessedMedia) -> None: ...


@dataclass
class MediaStore:
    """Share processed media between the processes of a program, in `folder`: each is processed once for many models.

    Each process adds at most `limit` bytes. `name` identifies the processor and the limits that made the pixels.
    """

    folder: Path
    limit: int
    name: str
    used: int = 0

    def get(self, key: str) -> ProcessedMedia | None:
        path = self._path(key)
        return read_media(path) if path.exists() else None

    def put(self, key: str, media: ProcessedMedia) -> None:
        size = sum(tensor.nbytes for tensor in media.tensors.values())
        if self.used + size > self.limit:
            return
        try:
            write_file(self._path(key), pack_media(media), durable=False)
        except ConfigError as error:
            self.limit = 0
            logger.warning("no more processed images are stored: %s", error)
        else:
            self.used += size

    def _path(self, key: str) -> Path:
        return self.folder / f"{sha256(f'{self.name} {key}'.encode()).hexdigest()}.safetensors"


def pack_media(media: ProcessedMedia) -> bytes:
    """Pack processed media as a safetensors file for `read_media`."""
    about = {"key": media.key, "kind": media.kind, "replacement": media.replacement, "ids": media.ids}
    tensors = {name: tensor.contiguous() for name, tensor in media.tensors.items()}
    return save(tensors, {"about": json.dumps(about)})


def read_media(path: str | Path) -> ProcessedMedia:
    """Read processed media from a file; the tensors share its memory."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return ProcessedMedia(about["key"], about["kind"], tensors, about["replacement"], about["ids"])


# Processors ----------------------------------------------------------------------------------------------------------


for _class in ("MiniCPMV4_6Processor", "MiniCPMV4_7Processor", "MiniCPMOcrProcessor"):
    if hasattr(transformers, _class):  # older versions lack some
        relies_on(getattr(transformers, _class), "_prepend_local_ids")


def limited_size(processor: Any, least: int | None, most: int | None) -> dict[str, int]:
    """Return the size of a processor's images under these limits of their area, None for its own."""
    size, limits = dict(processor.image_processor.size), {"shortest_edge": least, "longest_edge": most}
    if not limits.keys() <= size.keys():
        name = type(processor).__name__
        raise CheckpointError(f"{name} does not size images by area: remove min_pixels and max_pixels.")
    return size | {edge: area for edge, area in limits.items() if area is not None}


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
