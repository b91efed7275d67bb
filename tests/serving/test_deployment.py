"""The files under examples/serving are what systemd, Kubernetes and `vlmrm serve` read, and fit each other."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlmrm import cli
from vlmrm.serving.settings import load_settings

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "serving"


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """What the manifest describes, by kind and name."""
    found = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def container(kind: str, name: str) -> dict[str, Any]:
    [one] = objects()[kind, name]["spec"]["template"]["spec"]["containers"]
    return one


def test_the_unit_starts_a_command_that_there_is():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # ty: ignore
    unit.read(FOLDER / "vlmrm-serve.service")
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    program, *words = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "vlmrm"
    cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert int(unit["Service"]["TimeoutStopSec"]) > 100  # requests, batches and workers are waited for


def test_the_configuration_loads_with_its_secrets():
    settings = load_settings(FOLDER / "service.toml", {"VLMRM_TOKEN": "t", "VLMRM_REDIS_PASSWORD": "p"})
    assert ("Service", settings.redis_host) in objects()
    assert settings.redis_password.get_secret_value() == "p"
    arguments = " ".join(container("StatefulSet", "vlmrm-redis")["args"])
    assert "--appendonly yes" in arguments and "--maxmemory-policy noeviction" in arguments
    assert settings.limits.queue_bytes * 2 <= 4 * 2**30 and "--maxmemory 4gb" in arguments


@pytest.mark.parametrize("name", ["vlmrm-api", "vlmrm-workers"])
def test_the_manifest_s_commands_and_ports_are_the_service_s(name):
    one = container("Deployment", name)
    program, *words = one["args"]
    assert program == "vlmrm"
    cli.app.parse_args(words, exit_on_error=False, print_error=False)
    settings = load_settings(FOLDER / "service.toml", {"VLMRM_TOKEN": "t"})
    assert one["ports"] == [{"name": "http", "containerPort": settings.port}]
    spec = objects()["Deployment", name]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in one["volumeMounts"]} == {
        volume["name"] for volume in spec["template"]["spec"]["volumes"]
    }


def test_services_select_what_there_is():
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for (kind, _), one in objects().items() if kind != "Service"
    ]
    for (kind, _), one in objects().items():
        if kind == "Service":
            assert one["spec"]["selector"] in labels
