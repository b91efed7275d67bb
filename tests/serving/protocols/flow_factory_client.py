"""Flow-Factory's remote reward client, as its contract describes it: requests, five keys, no patience."""

from __future__ import annotations

import base64
import io
from typing import Any

import requests
from PIL import Image


class FlowFactoryClient:
    """Asks for the health once; posts up to three times at once, whatever the reason; believes any 2xx answer."""

    def __init__(self, server_url: str, timeout: float = 300, retry_attempts: int = 3):
        self.url, self.timeout, self.retry_attempts = server_url.rstrip("/"), timeout, retry_attempts
        self.session = requests.Session()
        self.posts = 0
        try:
            self.session.get(f"{self.url}/health", timeout=self.timeout).raise_for_status()
        except requests.RequestException as error:
            raise RuntimeError(f"Cannot connect to reward server at {self.url}") from error

    def __call__(self, prompt: list[str], **media: Any) -> list[float]:
        names = ("image", "video", "condition_images", "condition_videos")
        body = {"prompt": prompt, **{name: self.encoded(media.get(name)) for name in names}}
        for attempt in range(self.retry_attempts):
            try:
                self.posts += 1
                answer = self.session.post(f"{self.url}/compute", json=body, timeout=self.timeout)
                answer.raise_for_status()
                found = answer.json()
                break
            except requests.RequestException as error:
                if attempt + 1 == self.retry_attempts:
                    raise RuntimeError(f"Failed to connect to {self.url}: {error}") from error
        if found.get("error"):
            raise RuntimeError(f"Server error: {found['error']}")
        return found["rewards"]

    def encoded(self, media: Any) -> Any:
        if media is None:
            return None
        if isinstance(media, Image.Image):
            file = io.BytesIO()
            media.save(file, "PNG")
            return base64.b64encode(file.getvalue()).decode()
        return [self.encoded(one) for one in media]
