"""Rewards that cost nothing, so that the service's own work is what is measured."""

import json
import zlib


class Trivial:
    """Scores a checksum of the item's texts; the service names its group anew for each batch."""

    info = {"kind": "samples"}  # noqa: RUF012

    def __call__(self, items):
        texts = (json.dumps({**item, "group": None}, default=lambda _: None, sort_keys=True) for item in items)
        return [{"score": float(zlib.crc32(text.encode()))} for text in texts]


class Constant:
    """Answers the number in `score.txt` of its model."""

    def __init__(self, model_path):
        with open(f"{model_path}/score.txt") as file:
            self.score = float(file.read())

    def __call__(self, items):
        return [{"score": self.score} for _ in items]
