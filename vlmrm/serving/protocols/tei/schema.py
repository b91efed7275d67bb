"""Requests and answers of `POST /predict`."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PredictRequest(BaseModel):
    """One input or a list of them: a rendered conversation `[text]`, or a prompt and its answer `[text, text]`.

    A text by itself, or a list of two, is one input; lists of lists are a batch.
    """

    inputs: str | list[str] | list[list[str]]
    raw_scores: bool = False
    truncate: bool | None = Field(None, description="Nothing is cut off here, whatever it says.")
    truncation_direction: str | None = None

    def batch(self) -> list[list[str]] | None:
        """The inputs of a batch; None where there is one input."""
        if isinstance(self.inputs, list) and all(isinstance(one, list) for one in self.inputs):
            return [one for one in self.inputs if isinstance(one, list)]
        return None

    def only(self) -> list[str]:
        """The one input."""
        return [self.inputs] if isinstance(self.inputs, str) else [one for one in self.inputs if isinstance(one, str)]


class Prediction(BaseModel):
    """σ of the raw logit, or with `raw_scores` that itself."""

    score: float
    label: str = "LABEL_0"
