"""The Helm chart: linted and rendered by Helm itself, and valid for every Kubernetes release that is looked at."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli import build_parser
from server.serve_command import build_config
from tests.docker.engine import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

CHART = ROOT / "docker" / "helm" / "intarsia"
GPU: dict[str, Any] = {
    "model": "/models/mine",
    "servedModelNames": ["a", "b"],
    "gpu": {"enabled": True, "runtimeClassName": "nvidia"},
    "apiKeys": {"existingSecret": "keys"},
    "hfToken": {"existingSecret": "hf"},
    "offline": True,
    "weights": {"existingClaim": "weights", "subPath": "mine"},
    "cache": {"create": True, "storageClassName": "fast"},
    "extraArgs": ["--max-num-seqs=32"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "autoscaling": {"kind": "keda", "triggerMetadata": {"authModes": "bearer"}, "authenticationRef": "prometheus"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "x"}, "authorization": {"existingSecret": "scrape"}},
    "prometheusRule": {"enabled": True},
    "grafanaDashboard": {"enabled": True},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "strategy": {"type": "Recreate"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "podSecurityContext": {"runAsUser": None, "fsGroup": None},
}

Render = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask_helm(tools: Path) -> Render:
    tool = Path(__file__).with_name("chart_tool.py")

    def ask(**values: Any) -> dict[str, Any]:
        asked = json.dumps({"chart": str(CHART), "values": values})
        command = [str(tools / "python"), str(tool)]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert isinstance(said, dict)
        return said

    return ask


@pytest.fixture(scope="module")
def render(ask_helm: Render) -> Render:
    """The resources by kind, all valid."""

    def ask(**values: Any) -> dict[str, Any]:
        said = ask_helm(**values)
        assert said["lint"] == []
        assert said["error"] == ""
        assert said["invalid"] == []
        kinds = [resource["kind"] for resource in said["resources"]]
        assert len(set(kinds)) == len(kinds)
        return {resource["kind"]: resource for resource in said["resources"]}

    return ask


@pytest.fixture(scope="module")
def plain(render: Render) -> dict[str, Any]:
    return render()


@pytest.fixture(scope="module")
def on_gpu(render: Render) -> dict[str, Any]:
    return render(**GPU)


def pod_of(resources: dict[str, Any]) -> dict[str, Any]:
    pod = resources["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def test_the_defaults(plain: dict[str, Any]) -> None:
    assert set(plain) == {"Deployment", "PodDisruptionBudget", "Pod", "Service", "ServiceAccount"}
    (server,) = pod_of(plain)["containers"]
    assert server["image"] == "intarsia:0.1.0-cpu"
    labels = plain["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert plain["Service"]["spec"]["selector"] == labels
    assert plain["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def test_probes_and_drain(plain: dict[str, Any]) -> None:
    pod = pod_of(plain)
    (server,) = pod["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == server["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"
    startup = server["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 1200
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]
    config = build_config(build_parser().parse_args(["serve", *server["args"]]))
    assert pod["terminationGracePeriodSeconds"] > 10 + config.shutdown_timeout


@pytest.mark.parametrize("resources", ["plain", "on_gpu"])
def test_nothing_is_allowed_that_is_not_needed(resources: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(resources)
    for pod in (pod_of(found), found["Pod"]["spec"]):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("resources", ["plain", "on_gpu"])
def test_the_server_understands_its_arguments(resources: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    (server,) = pod_of(request.getfixturevalue(resources))["containers"]
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    arguments = [each.replace("/run/secrets/intarsia/api-keys", str(keys)) for each in server["args"]]
    config = build_config(build_parser().parse_args(["serve", *arguments]))
    assert config.port == server["ports"][0]["containerPort"]
    if resources == "on_gpu":
        assert config.model == "/models/mine"
        assert config.served_model_name == ("a", "b")
        assert config.device == "cuda"
        assert len(config.api_keys) == 1
        assert config.max_num_seqs == 32


def test_a_gpu_and_what_comes_with_it(on_gpu: dict[str, Any]) -> None:
    pod = pod_of(on_gpu)
    (server,) = pod["containers"]
    assert server["image"] == "intarsia:0.1.0-cuda"
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert server["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}
    assert pod["runtimeClassName"] == "nvidia"
    assert "runAsUser" not in pod["securityContext"], "OpenShift's to say"
    assert on_gpu["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert "replicas" not in on_gpu["Deployment"]["spec"], "the autoscaler's to say"
    mounts = {mount["name"]: mount for mount in server["volumeMounts"]}
    assert mounts["weights"]["readOnly"] is True
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    environment = {each["name"]: each for each in server["env"]}
    assert environment["HF_HUB_OFFLINE"]["value"] == "1"
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    assert "OMP_NUM_THREADS" not in environment


TLS_FILES = ("tls.crt", "tls.key", "ca.crt")


@pytest.mark.parametrize("clients", [False, True])
def test_https(ask_helm: Render, render: Render, tmp_path: Path, clients: bool) -> None:
    """With probes that need no certificate: a kubelet has none."""
    values: dict[str, Any] = {"tls": {"existingSecret": "cert", "clientCertificates": clients}}
    found = render(**values, serviceMonitor={"enabled": True, "tlsConfig": {"serverName": "x"}})
    pod = pod_of(found)
    (server,) = pod["containers"]
    for name in TLS_FILES:
        (tmp_path / name).touch()
    arguments = [each.replace("/run/secrets/tls", str(tmp_path)) for each in server["args"]]
    config = build_config(build_parser().parse_args(["serve", *arguments]))
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    assert files == tuple(str(tmp_path / name) if clients or name != "ca.crt" else None for name in TLS_FILES)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"http": config.port, "probes": config.probe_port}
    for kind in ("startup", "readiness", "liveness"):
        probe = server[f"{kind}Probe"]["httpGet"]
        assert (probe["port"], probe.get("scheme", "HTTP")) == ("probes", "HTTP")
    (volume,) = [each for each in pod["volumes"] if each["name"] == "tls"]
    (mount,) = [each for each in server["volumeMounts"] if each["name"] == "tls"]
    assert (volume["secret"]["secretName"], mount["mountPath"]) == ("cert", "/run/secrets/tls")
    assert [port["name"] for port in found["Service"]["spec"]["ports"]] == ["http"], "probes are nobody else's"
    (endpoint,) = found["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "x"})
    # `helm test` asks as a client, and has no certificate.
    assert ("Pod" in found) is not clients
    if not clients:
        assert found["Pod"]["spec"]["containers"][0]["command"][-1] == "https://demo-intarsia:8000"
    assert ("--cert" in ask_helm(**values)["notes"]) is clients


def test_limits_of_cpu_reach_torch(render: Render) -> None:
    (server,) = pod_of(render(resources={"limits": {"cpu": "2500m"}}))["containers"]
    (variable,) = server["env"]
    assert variable["name"] == "OMP_NUM_THREADS"
    assert variable["valueFrom"]["resourceFieldRef"] == {"resource": "limits.cpu", "divisor": "1"}


def test_autoscalers(on_gpu: dict[str, Any], render: Render) -> None:
    (trigger,) = on_gpu["ScaledObject"]["spec"]["triggers"]
    pods = 'namespace="prod",pod=~"demo-intarsia-[0-9a-z]+-[0-9a-z]+"'
    running, waiting = (f"intarsia:num_requests_{what}{{{pods}}}" for what in ("running", "waiting"))
    assert trigger["metadata"]["query"] == f"sum({running} + {waiting})"
    assert trigger["metadata"]["threshold"] == "16"
    assert trigger["authenticationRef"] == {"name": "prometheus"}
    scaler = render(autoscaling={"kind": "hpa", "targetRequestsPerReplica": 8})["HorizontalPodAutoscaler"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "intarsia_requests"},
        "target": {"type": "AverageValue", "averageValue": "8"},
    }


def test_monitoring(on_gpu: dict[str, Any]) -> None:
    monitor = on_gpu["ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == on_gpu["Service"]["spec"]["ports"][0]["name"]
    assert endpoint["authorization"]["credentials"] == {"name": "scrape", "key": "api-key"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= on_gpu["Service"]["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "x"
    alerts = yaml.safe_load((CHART / "files" / "alerts.yml").read_text())
    assert on_gpu["PrometheusRule"]["spec"] == alerts
    dashboard = on_gpu["ConfigMap"]["data"]["intarsia.json"]
    assert json.loads(dashboard) == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_an_offline_pod_talks_to_nobody(on_gpu: dict[str, Any], render: Render) -> None:
    assert on_gpu["NetworkPolicy"]["spec"].get("egress", []) == []
    policy = render(networkPolicy={"enabled": True})["NetworkPolicy"]["spec"]
    assert "from" not in policy["ingress"][0]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53, 443]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"replicas": 2}, "replicas"),
        ({"gpu": {"enabled": True}}, "model"),
        ({"gpu": {"count": 2}}, "count"),
        ({"port": 80}, "port"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"autoscaling": {"kind": "vpa"}}, "kind"),
        ({"autoscaling": {"minReplicas": 0}}, "minReplicas"),
        ({"extraArgs": "--port 1"}, "extraArgs"),
        ({"shutdownTimeout": "30s"}, "shutdownTimeout"),
        ({"tls": {"clientCertificates": True}}, "tls.existingSecret"),
        ({"tls": {"existingSecret": "cert"}, "port": 8001}, "probes.port"),
        ({"probes": {"port": 80}}, "port"),
    ],
)
def test_bad_values_are_refused(ask_helm: Render, values: dict[str, Any], name: str) -> None:
    said = ask_helm(**values)
    assert name in said["error"]
    assert said["resources"] == []


def test_every_value_has_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert {*values} == {*schema["properties"]} - {"global"}
    for name, value in values.items():
        if isinstance(value, dict) and "properties" in schema["properties"][name]:
            assert {*value} <= {*schema["properties"][name]["properties"]}, name


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert f"ARG VERSION={chart['appVersion']}" in (ROOT / "docker" / "Dockerfile").read_text()


def test_the_files_are_linted(tools: Path) -> None:
    files = [ROOT / "docker" / "Dockerfile", Path(__file__).with_name("prometheus.Dockerfile")]
    command = [str(tools / "hadolint"), "--failure-threshold", "warning", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}"
