"""The files under examples are what systemd, Kubernetes and `vlmrm serve` read, and fit each other."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlmrm import cli
from vlmrm.serving.settings import load_settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "kubernetes"
CONFIGURATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
ROLES = ("vlmrm-api", "vlmrm-workers")


def objects(*files: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What manifests describe, by kind and name."""
    found = [one for file in files for one in yaml.safe_load_all((FOLDER / file).read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


APPLIED = objects(*CONFIGURATION["resources"])


def pod(kind: str, name: str) -> dict[str, Any]:
    return APPLIED[kind, name]["spec"]["template"]["spec"]


def container(kind: str, name: str) -> dict[str, Any]:
    [one] = pod(kind, name)["containers"]
    return one


def arguments_exist(program: str, *words: str) -> None:
    assert Path(program).name == "vlmrm"
    cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_unit_starts_a_command_that_there_is():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # ty: ignore
    unit.read(EXAMPLES / "serving" / "vlmrm-serve.service")
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    arguments_exist(*unit["Service"]["ExecStart"].split())
    assert int(unit["Service"]["TimeoutStopSec"]) > 100  # requests, batches and workers are waited for


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_manifests_are_what_kubernetes_reads(version):
    validator = pytest.importorskip("kubernetes_validate")
    for one in APPLIED.values():
        validator.validate(one, version, strict=True)


def test_the_configuration_loads_with_its_secrets():
    settings = load_settings(FOLDER / "service.toml", {"VLMRM_TOKEN": "t", "VLMRM_REDIS_PASSWORD": "p"})
    assert ("Service", settings.redis_host) in APPLIED
    assert settings.redis_password.get_secret_value() == "p"
    arguments = " ".join(container("StatefulSet", "vlmrm-redis")["args"])
    assert "--appendonly yes" in arguments and "--maxmemory-policy noeviction" in arguments
    assert settings.limits.queue_bytes * 2 <= 4 * 2**30 and "--maxmemory 4gb" in arguments


@pytest.mark.parametrize("name", ROLES)
def test_manifest_commands_and_ports_match_the_service(name):
    one, settings = container("Deployment", name), load_settings(FOLDER / "service.toml", {"VLMRM_TOKEN": "t"})
    arguments_exist(*one["args"])
    assert one["args"][-1] == "/etc/vlmrm/service.toml" and one["volumeMounts"][0]["mountPath"] == "/etc/vlmrm"
    assert one["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert {one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")} <= {
        "/health",
        "/ready",
    }
    assert one["livenessProbe"]["httpGet"]["path"] == "/health"  # a worker that loads is no reason to kill it
