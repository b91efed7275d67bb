"""The service keeps to its OpenAPI document, whether a request fits the document or does not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext, suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance
from schemathesis.schemas import APIOperation

from tests.serving.services import fake, served

EXAMPLES = settings(max_examples=20, suppress_health_check=list(HealthCheck))
# Flow-Factory's client is told what is wrong in an answer of 200.
TOLD_OTHERWISE = ("POST /compute", "POST /{reward}/compute")


@pytest.fixture(scope="module")
def described() -> Generator[schemathesis.BaseSchema]:
    limits = {"max_items": 20, "max_body_bytes": 100_000, "max_json_depth": 12}
    with served(fake("one", "fake_reward.Anything"), limits=limits, long_poll=0.01) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json", timeout=300)


@pytest.mark.parametrize("mode", GenerationMode)
def test_answers_are_as_described(described, mode):
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        with suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else nullcontext():  # whatever is sent fits
            check(operation, mode)


def check(operation: APIOperation, mode: GenerationMode) -> None:
    # A schema cannot say that a reward exists, that a text is a conversation, that each prompt has its image.
    exempt = [positive_data_acceptance]
    if operation.label in TOLD_OTHERWISE:
        exempt.append(negative_data_rejection)

    @EXAMPLES
    @given(operation.as_strategy(generation_mode=mode))
    def answered_as_described(case):
        if "reward" in case.path_parameters:
            case.path_parameters["reward"] = "one"
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("timeout", None)  # one that is too short is a 504
        case.call_and_validate(excluded_checks=exempt, timeout=300)

    answered_as_described()
