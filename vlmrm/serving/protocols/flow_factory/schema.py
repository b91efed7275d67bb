"""Requests and answers of `POST /compute`. Keys that are not known are ignored, as clients may send more of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator


class ComputeRequest(BaseModel):
    """B samples as columns; an image is base64 of a PNG file, a video the list of its frames."""

    prompt: list[str] = Field(min_length=1)
    image: list[str] | None = None
    video: list[list[str]] | None = None
    condition_images: list[list[str]] | None = None
    condition_videos: list[list[list[str]]] | None = None

    @model_validator(mode="after")
    def _equally_long(self) -> ComputeRequest:
        for name, column in self.columns().items():
            if len(column) != len(self.prompt):
                raise ValueError(f"there are {len(self.prompt)} prompts but {len(column)} of {name}")
        return self

    def columns(self) -> dict[str, list[Any]]:
        """The media that are there."""
        names = ("image", "video", "condition_images", "condition_videos")
        return {name: column for name in names if (column := getattr(self, name)) is not None}


class ComputeAnswer(BaseModel):
    """One of the two."""

    rewards: list[float] | None = None
    error: str | None = None
