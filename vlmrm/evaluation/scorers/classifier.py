"""`hf:ID`: any `AutoModelForSequenceClassification`, of texts or, with a processor, of texts and images.

`?label=NAME` chooses the logit of a model with several labels; of two, it is otherwise the second minus the first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoProcessor, AutoTokenizer, ProcessorMixin

from vlmrm.batching.collator import OverlongError
from vlmrm.conversation import Conversation, Image, Message, Part, text_of
from vlmrm.data.media import open_image
from vlmrm.errors import CheckpointError, ConfigError, RowError, first_line
from vlmrm.evaluation.entry import Entry, Spec, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import ConversationScorer, origin_of
from vlmrm.libraries import hub_answers, parse_device
from vlmrm.modeling import resolve_attention, sequence_limit
from vlmrm.modeling.manifest import checkpoint_digest, local_folder
from vlmrm.settings import did_you_mean

logger = logging.getLogger("vlmrm")


class ClassifierEntry(Entry):
    """A sequence classifier on the hub or in a folder; `revision` is a branch, tag or commit."""

    def __init__(self, spec: Spec):
        options = spec.take(("label", "revision"))
        self.id, self.label = spec.body, options.get("label")
        self.revision = options.get("revision")
        parent, _, name = self.id.rstrip("/").rpartition("/")
        super().__init__(f"hf:{parent}" if parent else "hf", name + spec.suffix, spec.text)

    @cache  # noqa: B019 - an entry lives as long as its sweep, and its files are gigabytes
    def digest(self) -> str | None:
        """Return the digest of its files; the commit of those without safetensors."""
        folder = local_folder(self.id, self.revision)
        try:
            return checkpoint_digest(folder)
        except CheckpointError:
            return None if Path(self.id).is_dir() else folder.name

    def open(self, run: SweepRun) -> _Classifier:
        return _Classifier(self, run)


class _Classifier(ConversationScorer):
    """A classifier and its tokenizer, or its processor if it sees images."""

    def __init__(self, entry: ClassifierEntry, run: SweepRun):
        super().__init__(entry.path, run)
        if run.data_args.min_pixels or run.data_args.max_pixels:
            raise ConfigError(f"{entry.path} resizes images itself: leave min_pixels and max_pixels out.")
        if run.data_args.overlong == "trim":
            raise ConfigError(f"{entry.path} cannot trim what is too long: choose overlong: drop or error.")
        attention = None if run.args.attn_implementation == "auto" else resolve_attention(run.args.attn_implementation)
        hub = {
            "revision": entry.revision or "main",
            "trust_remote_code": run.args.trust_remote_code,
            "local_files_only": not (Path(entry.id).is_dir() or hub_answers()),
        }
        try:
            config = AutoConfig.from_pretrained(entry.id, **hub)
            opens = AutoProcessor if hasattr(config, "vision_config") else AutoTokenizer
            self.processor: Any = opens.from_pretrained(entry.id, **hub)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                entry.id,
                config=config,
                dtype=run.args.dtype,
                attn_implementation=attention,
                output_loading_info=True,
                **hub,
            )
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, StrictDataclassError) as error:
            reason = first_line(error).rstrip(".")
            raise CheckpointError(f"{entry.path} is no sequence classifier that can be opened: {reason}.") from error
        if missing := report["missing_keys"]:  # which transformers makes up
            raise CheckpointError(f"{entry.path} has no {min(missing)}: it is no trained sequence classifier.")
        self.visual = isinstance(self.processor, ProcessorMixin) and hasattr(self.processor, "image_processor")
        self.tokenizer = self.processor.tokenizer if isinstance(self.processor, ProcessorMixin) else self.processor
        self.sees = frozenset({"image"} if self.visual else ())
        self.entry = entry
        self.model = model.eval().requires_grad_(False).to(parse_device(None))
        self.label, read = _label(entry, model.config)
        self.details = {"id": entry.id, "revision": entry.revision or "main", "score": read}
        self.longest = self.tokenizer.model_max_length
        if hasattr(model.config.get_text_config(), "max_position_embeddings"):
            self.longest = min(self.longest, sequence_limit(model.config, run.data_args.max_seq_length))
        logger.info("%s is scored by %s", entry.path, read)

    @torch.inference_mode()
    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        results: dict[int, float | RowError] = {}
        inputs: dict[int, Any] = {}
        for index, conversation in enumerate(conversations):
            try:
                inputs[index] = self._rendered(conversation)
            except RowError as error:
                results[index] = error
        for part in self._parts(inputs):
            results |= zip(part, self._logits([inputs[index] for index in part]), strict=True)
        return [results[index] for index in range(len(conversations))]

    def _rendered(self, conversation: Conversation) -> Any:
        """Return the model's inputs for one conversation: tensors [1, T], and those of its images."""
        _ = conversation.answer  # raises where there is none
        if self.processor.chat_template is not None:
            written = [self._message(message) for message in conversation.messages]
            try:
                rendered = self.processor.apply_chat_template(
                    written, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=False
                )
            except (TemplateError, ValueError) as error:  # a role that it does not know, or an image of one pixel
                raise RowError(f"its processor refuses it: {first_line(error)}") from error
        elif len(conversation.prompt) <= 1 and not self.visual:
            texts = [text_of(messages) for messages in (conversation.prompt, [conversation.answer]) if messages]
            rendered = self.tokenizer(*texts, return_tensors="pt")  # a pair of texts, as encoders take
        else:
            raise RowError("its prompt has several turns, and the tokenizer has no chat template to write them by")
        if (length := rendered["input_ids"].shape[1]) > self.longest:
            raise OverlongError(f"{length} tokens are over the {self.longest} of {self.name}: lower max_seq_length")
        return rendered

    def _message(self, message: Message) -> dict[str, Any]:
        def written(part: Part) -> dict[str, Any]:
            if isinstance(part, Image):
                return {"type": "image", "image": open_image(part.reference)}
            return {"type": "text", "text": getattr(part, "text", "")}

        return {"role": message.role, "content": [*map(written, message.content)] if self.visual else message.text}

    def _parts(self, inputs: dict[int, Any]) -> list[list[int]]:
        """Return the indices of each forward: texts of similar lengths under the token budget, images one by one.

        Without a padding token, whose id tells the model where a text ends, texts go one by one as well.
        """
        pad = self.model.config.get_text_config().pad_token_id
        if self.visual or pad is None or pad != self.tokenizer.pad_token_id:
            return [[index] for index in inputs]
        budget = self.args.max_tokens_per_batch or 0
        parts: list[list[int]] = []
        lengths = {index: rendered["input_ids"].shape[1] for index, rendered in inputs.items()}
        for index in sorted(inputs, key=lambda index: -lengths[index]):
            if not parts or lengths[parts[-1][0]] * (len(parts[-1]) + 1) > budget > 0:
                parts.append([])
            parts[-1].append(index)
        return parts

    def _logits(self, inputs: Sequence[Any]) -> list[float]:
        batch = inputs[0]
        if len(inputs) > 1:
            rows = [{name: value[0].tolist() for name, value in item.items()} for item in inputs]
            batch = self.tokenizer.pad(rows, padding_side="right", return_tensors="pt")
        logits = self.model(**batch.to(self.model.device)).logits.float()
        first, second = self.label
        return (logits[:, second] - (0 if first is None else logits[:, first])).tolist()

    def origin(self) -> Origin:
        device = self.model.device
        return {
            **origin_of(
                self.entry.digest(),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                dtype=str(self.model.dtype).removeprefix("torch."),
                **self.details,
            ),
            "attention": self.model.config._attn_implementation,
        }


def _label(entry: ClassifierEntry, config: Any) -> tuple[tuple[int | None, int], str]:
    """Return the logit to subtract, if any, and the logit of the score, and both in words."""
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    if entry.label is not None:
        if entry.label not in names:
            hint = did_you_mean(entry.label, names, f": it has {', '.join(names)}.")
            raise ConfigError(f"{entry.path}: there is no label {entry.label}{hint}")
        return (None, names.index(entry.label)), f"the logit of {entry.label}"
    if len(names) == 1:
        return (None, 0), "its logit"
    if len(names) == 2:
        return (0, 1), f"the logit of {names[1]} minus that of {names[0]}"
    raise ConfigError(
        f"{entry.path} has {len(names)} labels ({', '.join(names[:8])}): choose one as hf:{entry.id}?label=NAME."
    )
