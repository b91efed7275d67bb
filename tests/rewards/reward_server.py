"""A reward server on this machine that answers as a test tells it to."""

from __future__ import annotations

import base64
import io
import json
from collections import deque
from typing import Any

from PIL import Image

from tests.rewards.judges.judge_server import Answer, JudgeServer


class RewardServer(JudgeServer):
    """Answers the width of each image, after the `faults`, each taken once: (status, body, headers), CUT or SILENT."""

    CUT = "the connection is cut"
    SILENT = "nothing comes"

    def __init__(self, prefix: str = ""):
        super().__init__(prefix)
        self.faults: deque[Any] = deque()
        self.behave = self.widths
        self.start()

    def widths(self, body: dict[str, Any], number: int) -> Answer | None:
        fault = self.faults.popleft() if self.faults else None
        if fault == self.SILENT:
            self.hold()
        if fault in (self.SILENT, self.CUT):
            return None
        if fault is not None:
            status, text, *headers = fault
            return status, headers[0] if headers else {}, text
        return 200, {}, json.dumps({"rewards": [decoded(png).width for png in body["image"]]})


def decoded(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png, validate=True)), formats=["PNG"])
