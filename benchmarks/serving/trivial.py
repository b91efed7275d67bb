"""A reward that costs nothing, so that the service's own work is what is measured."""


class Trivial:
    """Scores the length of the prompt."""

    info = {"kind": "samples"}  # noqa: RUF012

    def __call__(self, items):
        return [{"score": float(len(item["prompt"]))} for item in items]
