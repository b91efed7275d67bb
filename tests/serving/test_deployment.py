"""The files under examples are what systemd, Kubernetes and `vlmrm serve` read, and fit each other."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from tests.serving.redis_server import reserved
from tests.serving.services import eventually, in_loop
from vlmrm import cli
from vlmrm.serving.settings import load_settings
from vlmrm.serving.telemetry import Metrics, RequestMetrics

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


@in_loop
async def test_haproxy_bounds_balances_and_names_clients(tmp_path):
    if shutil.which("haproxy") is None:
        pytest.skip("no haproxy is here to read and run its configuration: apt-get install haproxy")
    held, may_end = [], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("post"):
            held.append((writer.get_extra_info("sockname")[1], re.findall(r"\nx-forwarded-for: (.*)\r", head)))
            await may_end.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    services = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    ports, holder, pem = [it.sockets[0].getsockname()[1] for it in services], reserved(), str(tmp_path / "pem")
    url = f"127.0.0.1:{holder.getsockname()[1]}"
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -keyout {pem} -out {pem}"
    subprocess.run(make.split(), check=True, capture_output=True)
    content = (EXAMPLES / "serving" / "haproxy.cfg").read_text()
    changes = {"bind :443": f"bind {url}", "crt /etc/haproxy/vlmrm.pem": f"crt {pem}", "maxconn 512": "maxconn 1"}
    changes |= {f"127.0.0.1:808{i}": f"127.0.0.1:{port}" for i, port in enumerate(ports)}
    for old, new in {**changes, "timeout queue 2s": "timeout queue 50"}.items():
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    (tmp_path / "haproxy.cfg").write_text(content)
    proxy = subprocess.Popen(["haproxy", "-f", str(tmp_path / "haproxy.cfg")], stdout=subprocess.DEVNULL)
    network = httpx.AsyncHTTPTransport(verify=False, retries=8)  # the first seconds nobody listens
    client = httpx.AsyncClient(transport=network, base_url=f"https://{url}", headers={"X-Forwarded-For": "6.6.6.6"})
    try:
        assert (await client.get("/health")).json() == {"status": "ok"}
        asked = [asyncio.create_task(client.post("/v1/rewards", timeout=60)) for _ in ports]
        await eventually(lambda: sorted(held) == [(port, ["127.0.0.1"]) for port in sorted(ports)])
        refused = await client.post("/v1/rewards")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
        assert set(refused.json()["error"]) == {"message", "type"} and (await client.get("/health")).is_success
        may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    finally:
        proxy.kill()


def test_the_dashboard_draws_each_metric_by_its_labels():
    suffixes = {"Counter": "_total", "Histogram": "_bucket", "Gauge": ""}
    held = [*vars(Metrics()).values(), *vars(RequestMetrics()).values()]
    collectors = [one for one in held if type(one).__name__ in suffixes]
    labels = {f"{it._name}{suffixes[type(it).__name__]}": {*it._labelnames, "le"} for it in collectors}
    drawn = json.loads((EXAMPLES / "serving" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in drawn for target in panel.get("targets", ())]
    assert {name for query in queries for name in re.findall(r"vlmrm_\w+", query)} == labels.keys()
    for query in queries:
        used = set(re.findall(r"(\w+)[=!]~?\"", query)) | set(
            re.findall(r"\w+", "".join(re.findall(r"by \((.*?)\)", query)))
        )
        assert used <= set.union(*(labels[name] for name in re.findall(r"vlmrm_\w+", query))), query


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_manifests_are_what_kubernetes_reads(version):
    validator = pytest.importorskip("kubernetes_validate")
    for one in APPLIED.values():
        validator.validate(one, version, strict=True)


def test_the_configuration_loads_with_its_secrets(tmp_path):
    shutil.copy(FOLDER / "service.toml", tmp_path)
    for command in re.findall(r"^#   (.*openssl.*)", (FOLDER / "kustomization.yaml").read_text(), re.MULTILINE):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    secrets = dict(line.split("=") for line in (tmp_path / "secrets.env").read_text().splitlines())
    settings = load_settings(tmp_path / "secret.toml", secrets)
    assert ("Service", settings.redis_host) in APPLIED
    assert [client.name for client in settings.callers] == ["trainer", "default"]
    assert settings.redis_password.get_secret_value() == secrets["VLMRM_REDIS_PASSWORD"]
    arguments = " ".join(container("StatefulSet", "vlmrm-redis")["args"])
    assert "--appendonly yes" in arguments and "--maxmemory-policy noeviction" in arguments
    assert settings.limits.queue_bytes * 2 <= 4 * 2**30 and "--maxmemory 4gb" in arguments


def test_only_the_service_may_reach_its_redis():
    [rule] = APPLIED["NetworkPolicy", "vlmrm-redis"]["spec"]["ingress"]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchExpressions"] == [{"key": "app", "operator": "In", "values": list(ROLES)}]


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
