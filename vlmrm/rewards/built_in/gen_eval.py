"""`gen_eval`: GenEval's check of the objects, counts, colours and positions in an image.

Thresholds and geometry are those of the published evaluation (Ghosh et al. 2023, arXiv:2310.11513).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, Field, ValidationError
from torch.nn.functional import interpolate, normalize
from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, Mask2FormerForUniversalSegmentation

from vlmrm.errors import RewardError
from vlmrm.modeling.published_weights import pretrained
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, Verdict, choice
from vlmrm.settings import Strict, describe_errors, did_you_mean

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"
MOST_DETECTIONS = 100  # of an image, over all classes, before any threshold
BACKGROUND = "#999999"
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
# COCO's classes that GenEval calls otherwise, and the names of VOC and darknet for some, which detectors also have.
NAMES = {
    "mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard",
    "motorbike": "motorcycle", "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant",
    "diningtable": "dining table", "tvmonitor": "tv", "hair dryer": "hair drier",
}  # fmt: skip

Task = Literal["single_object", "two_object", "counting", "colors", "position", "color_attr"]
Color = Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
Relation = Literal["left of", "right of", "above", "below"]
COLORS = get_args(Color)

THRESHOLD = 0.3  # least score of a detection,
COUNTING_THRESHOLD = 0.9  # where objects are counted
MAX_OBJECTS = 16  # of one class, the highest scores
POSITION_THRESHOLD = 0.1  # least distance of centres, as a share of both sizes
DIRECTION = 0.5  # least share of the offset in a direction


class GenEval(PointwiseRewardModel):
    """GenEval's verdict on an image (Ghosh et al. 2023, arXiv:2310.11513).

    Mask2Former detects the 80 classes of COCO, CLIP classifies the colour of each object, cut out on grey. Each sample
    has a column `metadata`, GenEval's row for its prompt (see `requirements`). With the setting `score: strict`, the
    default, the reward is 1 or 0; with `graded` it is the mean over the conditions of how far each is met. Counts are
    the least ones that will do, as in GenEval; with `counts: exact` an object too many is as wrong as one too few.

    The published evaluation runs mmdet's Mask2Former, which has the same weights (Swin-S, COCO instances), on images
    of up to 800 x 1333 pixels; here transformers' runs on the output of the checkpoint's own image processor (384 x
    384 for the default), so small objects can differ. A class that the detector has under no name of `NAMES` is
    refused in the prompt that asks for it. Both models run in float32, as published, whatever `dtype` is.
    """

    required_fields = ("prompt", "image", "metadata")
    options = ("score", "counts", "detector_path", "clip_path")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        self.score = {"strict": strict, "graded": graded}[choice(config, "score", "strict", ("strict", "graded"))]
        self.judge = {"at_least": conditions, "exact": exact_conditions}[
            choice(config, "counts", "at_least", ("at_least", "exact"))
        ]
        detector, clip = (
            config.extra_kwargs.get(*pair) for pair in (("detector_path", DETECTOR), ("clip_path", CLIP))
        )
        self.detector = Detector(detector, self.device)
        self.colors = ColorClassifier(clip, self.device)

    def to(self, device: str | torch.device) -> GenEval:
        super().to(device)
        self.detector.model.to(self.device)
        self.colors.model.to(self.device)
        return self

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], image: list[Image.Image], metadata: list[Any]
    ) -> RewardModelOutput:
        return RewardModelOutput.each(self._verdict, image, metadata)

    def _verdict(self, picture: Image.Image, row: Any) -> Verdict:
        required = requirements(row, self.detector.labels)
        objects = confident_objects(self.detector(picture), required.tag)
        judged = self.judge(required, objects, lambda detected: self.colors(picture, detected))
        report = [[condition.text, condition.met] for condition in judged]
        found = {label: len(detections) for label, detections in objects.items()}
        return Verdict(self.score(judged), {"conditions": report, "found": found})


class Detector:
    """Mask2Former on one image at a time, so that no image affects another."""

    def __init__(self, path: str, device: Any):
        self.model = pretrained(Mask2FormerForUniversalSegmentation, path, dtype=torch.float32).to(device).eval()
        self.processor = pretrained(AutoImageProcessor, path)
        names = self.model.config.id2label
        plain = [names[number].replace("_", " ") for number in range(len(names))]
        self.labels = [NAMES.get(name, name) for name in plain]

    @torch.no_grad()
    def __call__(self, image: Image.Image) -> list[Detection]:
        inputs = self.processor(image, return_tensors="pt").to(self.model.device)
        outputs = self.model(pixel_values=inputs["pixel_values"])
        height, width = inputs["pixel_values"].shape[-2:]
        masks = interpolate(outputs.masks_queries_logits, (height, width), mode="bilinear", align_corners=False)[0]
        # Padding is at the right and at the bottom.
        valid = inputs["pixel_mask"][0] if "pixel_mask" in inputs else torch.ones(height, width)
        masks = masks[:, : int(valid.any(1).sum()), : int(valid.any(0).sum())]
        return detections(outputs.class_queries_logits[0], masks, (image.height, image.width), self.labels)


def detections(
    class_logits: torch.Tensor, mask_logits: torch.Tensor, size: tuple[int, int], labels: Sequence[str]
) -> list[Detection]:
    """Return the objects of Q queries by `class_logits[Q, classes + 1]`, "no object" last, and `mask_logits[Q, h, w]`.

    A query's score for a class is its probability times the mean probability of the pixels in its mask; the box is the
    mask's, in an image of `size` (height, width). Queries that cannot exceed GenEval's lower threshold are left out.
    """
    probabilities = class_logits.float().softmax(-1)[:, :-1]
    most = min(MOST_DETECTIONS, probabilities.numel())
    objects = []
    for score, index in zip(*(values.tolist() for values in probabilities.flatten().topk(most)), strict=True):
        query, label = divmod(index, probabilities.shape[1])
        if score <= THRESHOLD:
            continue
        logits = interpolate(mask_logits[query][None, None].float(), size, mode="bilinear", align_corners=False)[0, 0]
        mask = logits > 0
        if not mask.any():
            continue
        score *= float(logits[mask].sigmoid().mean())
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
        objects.append(Detection(labels[label], score, box, mask.cpu().numpy()))
    return objects


class ColorClassifier:
    """CLIP's choice among `COLORS` for the objects of one image, each cut out on grey."""

    def __init__(self, path: str, device: Any):
        self.model = pretrained(CLIPModel, path, dtype=torch.float32).to(device).eval()
        self.processor = pretrained(CLIPProcessor, path)
        self._directions: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: Image.Image, objects: Sequence[Detection]) -> list[str]:
        crops = [cut_out(image, detection) for detection in objects]
        pixels = self.processor(images=crops, return_tensors="pt")["pixel_values"].to(self.model.device)
        features = normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
        return [COLORS[best] for best in (features @ self._directions_of(objects[0].label).T).argmax(-1).tolist()]

    def _directions_of(self, label: str) -> torch.Tensor:
        """Return the text embedding of each colour of a class, [colours, D]: the mean over the templates."""
        if label not in self._directions:
            texts = [template.format(color=color, label=label) for color in COLORS for template in TEMPLATES]
            tokens = self.processor(text=texts, padding=True, return_tensors="pt").to(self.model.device)
            features = normalize(self.model.get_text_features(**tokens).pooler_output, dim=-1)
            self._directions[label] = normalize(features.view(len(COLORS), len(TEMPLATES), -1).mean(1), dim=-1)
        return self._directions[label].to(self.model.device)


def cut_out(image: Image.Image, detection: Detection) -> Image.Image:
    """Return the object's box, with everything but the object painted grey."""
    grey = Image.new("RGB", image.size, BACKGROUND)
    masked = image if detection.mask is None else Image.composite(image, grey, Image.fromarray(detection.mask))
    left, top, right, bottom = (int(edge) for edge in detection.box)
    return masked.crop((left, top, right, bottom))


@dataclass(frozen=True)
class Detection:
    """An object in an image: `box` is left, top, right, bottom in pixels, `mask` [H, W] its pixels."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


class Clause(Strict, frozen=True):
    """`count` objects of a class, all of `color`, each in relation `position[0]` to each of clause `position[1]`."""

    label: str = Field(alias="class")
    count: int = Field(ge=1, strict=True)
    color: Color | None = None
    position: tuple[Relation, int] | None = None


class Requirements(BaseModel, frozen=True):
    """The conditions of a prompt: all of `include`, and less than the count of each of `exclude`."""

    tag: Task
    include: tuple[Clause, ...] = Field(min_length=1)
    exclude: tuple[Clause, ...] = ()


@dataclass(frozen=True)
class Condition:
    """One condition and how far it is met, from 0 to 1."""

    text: str
    met: float


def requirements(metadata: Any, labels: Iterable[str]) -> Requirements:
    """Return the requirements in a row of GenEval's `evaluation_metadata.jsonl`, a mapping or its JSON text.

        {"tag": "position", "include": [{"class": "dog", "count": 1},
                                        {"class": "cat", "count": 1, "color": "red", "position": ["left of", 0]}],
         "exclude": [{"class": "dog", "count": 2}]}

    Args:
        labels: the classes that the detector knows.
    """
    read = Requirements.model_validate_json if isinstance(metadata, str) else Requirements.model_validate
    try:
        required = read(metadata)
    except ValidationError as error:
        raise RewardError(f"its metadata: {describe_errors(error.errors(), Requirements, values=True)}") from None
    for number, clause in enumerate(required.include):
        if clause.position is not None and not 0 <= clause.position[1] < number:
            raise RewardError(f"its metadata: position of include.{number} is {clause.position}, of no earlier clause")
    for clause in (*required.include, *required.exclude):
        if clause.label not in labels:
            hint = did_you_mean(clause.label, labels, f": choose from {', '.join(sorted(labels))}")
            raise RewardError(f"its metadata has the class {clause.label!r}, which the detector has not{hint}")
    return required


def confident_objects(detections: Iterable[Detection], task: str) -> dict[str, list[Detection]]:
    """Return the detections above the task's threshold by class, highest scores first."""
    least = COUNTING_THRESHOLD if task == "counting" else THRESHOLD
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        if detection.score > least:
            objects.setdefault(detection.label, []).append(detection)
    return {label: of_class[:MAX_OBJECTS] for label, of_class in objects.items()}


def conditions(
    required: Requirements,
    objects: Mapping[str, Sequence[Detection]],
    colors: Callable[[Sequence[Detection]], Sequence[str]],
) -> list[Condition]:
    """Return how far each condition is met; GenEval calls the image correct where all are met in full.

    A count n is met by the share of the objects that are present. Where n + 1 of the class are excluded it is exact,
    met by 1 - |detected - n| / n, at least 0: an object too many is as wrong as one too few. A colour is met by the
    share that has it, a position and any other exclusion in full or not at all. Colour and position are of the `count`
    objects with the highest scores; a position needs at least the count of both clauses and their colours.
    """
    judged: list[Condition] = []
    matched: list[Sequence[Detection] | None] = []  # the objects of each clause that is met in full
    exact = {(clause.label, clause.count - 1) for clause in required.exclude}
    for clause in required.include:
        present = objects.get(clause.label, ())
        candidates = present[: clause.count]
        met = len(candidates) == clause.count
        if (clause.label, clause.count) in exact:
            off = abs(len(present) - clause.count)
            judged.append(Condition(f"exactly {clause.count} {clause.label}", max(1 - off / clause.count, 0.0)))
        else:
            judged.append(Condition(f"{clause.count} {clause.label}", len(candidates) / clause.count))
        if clause.color is not None:
            right = list(colors(candidates)).count(clause.color) if candidates else 0
            met = met and right == clause.count
            judged.append(Condition(f"{clause.color} {clause.label}", right / clause.count))
        if clause.position is not None:
            relation, target = clause.position
            met = met and _placed(relation, candidates, matched[target])
            judged.append(Condition(f"{clause.label} {relation} {required.include[target].label}", float(met)))
        matched.append(candidates if met else None)
    counted = {(clause.label, clause.count) for clause in required.include}
    for clause in required.exclude:
        if (clause.label, clause.count - 1) in counted:
            continue  # in that clause's exact count
        few = len(objects.get(clause.label, ())) < clause.count
        judged.append(Condition(f"fewer than {clause.count} {clause.label}", float(few)))
    return judged


def exact_conditions(
    required: Requirements,
    objects: Mapping[str, Sequence[Detection]],
    colors: Callable[[Sequence[Detection]], Sequence[str]],
) -> list[Condition]:
    """Return the conditions of Flow-GRPO's reward (Liu et al. 2025, arXiv:2505.05470), where every count is exact.

    A count n is met by 1 - |detected - n| / n, which is below 0 for more than 2n objects. Only where it is right is
    there a colour, met by the share that has it, and only where that is right too a position; a wrong count leaves 0
    in place of both. A position that does not hold is a 0 beside a 1, and so a half, unless its target is missing.
    What is excluded is asked for where no count is of its class, which Flow-GRPO leaves out.
    """
    judged: list[Condition] = []
    matched: list[Sequence[Detection] | None] = []  # the objects of each clause that is met in full
    for clause in required.include:
        present = objects.get(clause.label, ())
        met = len(present) == clause.count
        off = abs(len(present) - clause.count)
        judged.append(Condition(f"exactly {clause.count} {clause.label}", 1 - off / clause.count))
        if not met and (clause.color is not None or clause.position is not None):
            judged.append(Condition(f"colour and position of {clause.count} {clause.label}", 0.0))
        if met and clause.color is not None:
            right = list(colors(present)).count(clause.color)
            met = right == clause.count
            judged.append(Condition(f"{clause.color} {clause.label}", right / clause.count))
        if met and clause.position is not None:
            relation, target = clause.position
            met, text = _placed(relation, present, matched[target]), required.include[target].label
            judged += [Condition(f"{clause.label} {relation} {text}", 0.0)] * (not met)
            judged += [Condition(f"{clause.label} {relation} {text}", 1.0)] * (matched[target] is not None)
        matched.append(present if met else None)
    counted = {clause.label for clause in required.include}
    for clause in required.exclude:
        if clause.label not in counted:
            few = len(objects.get(clause.label, ())) < clause.count
            judged.append(Condition(f"fewer than {clause.count} {clause.label}", float(few)))
    return judged


def strict(judged: Sequence[Condition]) -> float:
    """Return 1 where all conditions are met in full, else 0: GenEval's own verdict."""
    return float(all(condition.met == 1 for condition in judged))


def graded(judged: Sequence[Condition]) -> float:
    """Return the mean of how far the conditions are met, at most 1; 1 exactly where `strict` is."""
    return sum(condition.met for condition in judged) / len(judged)


def _placed(relation: str, objects: Sequence[Detection], targets: Sequence[Detection] | None) -> bool:
    """Return whether each of the objects is so placed from each of the targets, None where these are not as wanted."""
    return targets is not None and all(relation in relations(one, other) for one in objects for other in targets)


def relations(first: Detection, second: Detection) -> set[str]:
    """Return the relations of `first` to `second`: none, one or two of `Relation`.

    With d the offset of the centres and s the sum of both sizes, along each axis max(|d| - POSITION_THRESHOLD s, 0)
    sign(d) / length of d must exceed DIRECTION.
    """
    offset, beyond = [], []
    for axis in (0, 1):
        low, high = (first.box[axis], second.box[axis]), (first.box[axis + 2], second.box[axis + 2])
        apart = (low[0] + high[0]) / 2 - (low[1] + high[1]) / 2
        sizes = abs(high[0] - low[0]) + abs(high[1] - low[1])
        offset.append(apart)
        beyond.append(math.copysign(max(abs(apart) - POSITION_THRESHOLD * sizes, 0), apart))
    if max(abs(value) for value in beyond) < 1e-3:
        return set()
    x, y = (value / math.hypot(*offset) for value in beyond)
    holds = {"left of": x < -DIRECTION, "right of": x > DIRECTION, "above": y < -DIRECTION, "below": y > DIRECTION}
    return {relation for relation, true in holds.items() if true}
