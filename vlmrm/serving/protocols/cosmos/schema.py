"""Requests of cosmos-rl's reward service: the JSON before the media of an enqueue, and what a pull asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)

Kind = Literal["image", "video", "latent"]


def _rate(info: dict[str, Any]) -> dict[str, Any]:
    """`video_fps` as the service of cosmos-rl reads it, `fps` as its documents have it."""
    rate = info.get("video_fps", info.get("fps"))
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1e6:
        raise ValueError("video_fps is missing or wrong: say how many frames a second the video has")
    return {**info, "video_fps": float(rate)}


VideoInfo = Annotated[dict[str, Any], AfterValidator(_rate)]


class Metadata(BaseModel):
    """B samples, and which rewards they get; keys that are not here go to the handlers of `engine` rewards.

    Weights are the client's own business: it fetches every reward that it names, and multiplies.
    """

    model_config = ConfigDict(extra="allow")

    prompts: list[str] = Field(min_length=1)
    reward_fn: dict[str, StrictInt | StrictFloat] = Field(min_length=1)
    media_type: Kind = "latent"
    video_infos: list[VideoInfo] | None = None
    geneval_tags: list[str] | None = None
    geneval_includes: list[list[dict[str, Any]]] | None = None
    geneval_only_strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_for_geneval(cls, given: Any) -> Any:
        """Older clients ask GenEval about one image, by `prompt`, `tag` and `include`."""
        if isinstance(given, dict) and "prompts" not in given and "prompt" in given:
            names = {"prompt": "prompts", "tag": "geneval_tags", "include": "geneval_includes"}
            return {names.get(key, key): [value] if key in names else value for key, value in given.items()}
        return given

    @field_validator("media_type", mode="before")
    @classmethod
    def _in_any_case(cls, given: Any) -> Any:
        return given.lower() if isinstance(given, str) else given

    @model_validator(mode="after")
    def _equally_long(self) -> Metadata:
        columns = {
            "video_infos": None if self.media_type == "image" else self.video_infos,
            "geneval_tags": self.geneval_tags,
            "geneval_includes": self.geneval_includes,
        }
        for name, column in columns.items():
            if column is not None and len(column) != len(self.prompts):
                raise ValueError(f"there are {len(self.prompts)} prompts but {len(column)} of {name}")
        if self.media_type != "image" and self.video_infos is None:
            raise ValueError("video_infos is missing: say the video_fps of each video")
        if (self.geneval_tags is None) != (self.geneval_includes is None):
            raise ValueError("geneval_tags and geneval_includes go together: send both")
        return self


class Pull(BaseModel):
    """`type` may be left out where the request asked for one reward."""

    uuid: str = Field(min_length=1, max_length=64)
    type: str | None = None
