"""Dockerfile, Kubernetes manifest and Grafana dashboard, against the server that they deploy and watch."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from typer.testing import CliRunner

from quire.cli.app import app
from quire.config import ServerConfig
from quire.config.settings import make
from quire.demo import adapter_path
from quire.server import launch as serve
from quire.server.metrics import TRANSFERS
from tests.server.api_server import KEY, LocalServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# Families that the dashboard does not show, and why.
_DRAFTS = ("quire_drafts", "quire_draft_tokens", "quire_accepted_draft_tokens")
UNSHOWN = {"quire_adapter_tier": "a series for each adapter, to look one up; quire_adapters sums them by tier"}
UNSHOWN |= dict.fromkeys(_DRAFTS, "zero unless the engine is asked for draft tokens")
_TRANSFERS = ("held_bytes", *TRANSFERS)
UNSHOWN |= {f"quire_kv_transfer_{name}": "zero unless KV blocks are kept beside the pool" for name in _TRANSFERS}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """It asks for a key, as the deployed one does."""
    with LocalServer({"enable_lora": True}, api_keys=(KEY,)) as running:
        yield running


def task_of(monkeypatch: pytest.MonkeyPatch, words: Sequence[str], variables: Mapping[str, str]) -> serve.Task:
    """What `quire serve` would do with these arguments and variables."""
    tasks: list[serve.Task] = []
    monkeypatch.setattr(serve, "serve", lambda task: tasks.append(task) or 0)
    result = CliRunner().invoke(app, ["serve", *words], env=dict(variables))
    assert result.exit_code == 0, result.output
    return tasks[0]


def serve_variables() -> set[str]:
    """The variables that `quire serve` reads. Others of this kind it would pass over without a word."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    of_one = [param.envvar for param in command.params if param.envvar]
    return {name for names in of_one for name in ([names] if isinstance(names, str) else names)}


def unknown_variables(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("QUIRE_")} - serve_variables()


# -- Dockerfile -----------------------------------------------------------------------------------------------


def instructions() -> list[list[tuple[str, str]]]:
    """Keyword and rest of each instruction, by stage; before the first stage, one list of ARGs."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            stages.append([])
        stages[-1].append((keyword, rest.strip()))
    return stages


def final(keyword: str) -> list[str]:
    """The last stage's instructions of a kind."""
    return [rest for name, rest in instructions()[-1] if name == keyword]


def image_variables() -> dict[str, str]:
    pairs = [word.partition("=") for rest in final("ENV") for word in shlex.split(rest)]
    return {name: value for name, _, value in pairs}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=TOOLS)
    assert hadolint is not None
    done = subprocess.run([hadolint, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_image_listens_to_all_whatever_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [json.loads(rest) for rest in final("ENTRYPOINT")] == [["quire", "serve"]]
    assert not final("CMD")  # it would be gone as soon as there are arguments
    variables = image_variables()
    assert not unknown_variables(set(variables))
    task = task_of(monkeypatch, ["some/model", "--max-num-seqs", "4"], variables)
    assert task.settings["model"] == "some/model" and task.settings["max_num_seqs"] == 4
    assert task.settings["host"] == "0.0.0.0"
    assert task.settings["log_format"] == "json"
    assert final("EXPOSE") == [str(make(ServerConfig, task.settings).port)]


def test_the_image_has_no_root_and_no_build_tools() -> None:
    user, group = (int(part) for part in final("USER")[-1].split(":"))
    assert user > 0 and group > 0
    assert not [rest for rest in final("RUN") if re.search(r"\b(apt|apt-get|pip|g\+\+|gcc|cmake)\b", rest)]
    assert image_variables()["HF_HOME"] in json.loads(final("VOLUME")[0])


def test_what_the_builder_copies_is_there_and_reaches_it() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"  # nothing that is not named: no history, no environment, no keys
    sources: list[str] = []
    for stage in instructions():
        for keyword, rest in stage:
            if keyword == "COPY" and not rest.startswith("--from"):
                sources += rest.split()[:-1]
    assert {"quire", "csrc", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        taking = [rule for rule in rules if fnmatch.fnmatch(source, rule.removeprefix("!"))]
        assert taking[-1].startswith("!"), source


def test_the_health_check_tells_a_server_that_lives_from_one_that_does_not(server: LocalServer) -> None:
    options, _, command = final("HEALTHCHECK")[0].partition("CMD ")
    assert "--start-period" in options
    python, *rest = json.loads(command)
    assert python == "python"

    def check(port: str) -> int:
        # A proxy that leads nowhere must make no difference.
        environment = {**os.environ, "QUIRE_PORT": port, "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run([sys.executable, *rest], env=environment, capture_output=True).returncode

    assert check(server.url.rpartition(":")[2]) == 0
    assert check("9") != 0


# -- Kubernetes -----------------------------------------------------------------------------------------------


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))


def document(kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents() if one["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    return document("Deployment")["spec"]["template"]


def container() -> dict[str, Any]:
    (found,) = pod()["spec"]["containers"]
    return found


def probes() -> dict[str, dict[str, Any]]:
    return {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}


def pod_task(monkeypatch: pytest.MonkeyPatch) -> serve.Task:
    """What the container runs: its arguments and variables beside the image's, secrets by their names."""
    given = {one["name"]: one.get("value", one["name"]) for one in container()["env"]}
    assert not unknown_variables(set(given))
    return task_of(monkeypatch, container()["args"], {**image_variables(), **given})


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_every_document_is_what_kubernetes_takes(version: str) -> None:
    assert {one["kind"] for one in documents()} >= {"Deployment", "Service", "PodDisruptionBudget"}
    for one in documents():
        kubernetes_validate.validate(one, version, strict=True)


def test_every_selector_finds_the_pod() -> None:
    labels = pod()["metadata"]["labels"]
    deployment, budget = document("Deployment")["spec"], document("PodDisruptionBudget")["spec"]
    for selector in (
        deployment["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        document("Service")["spec"]["selector"],
    ):
        assert selector and selector.items() <= labels.items()


def test_the_container_gets_options_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    task = pod_task(monkeypatch)
    server = make(ServerConfig, task.settings)
    assert server.host == "0.0.0.0"
    assert server.api_keys == ("QUIRE_API_KEY",) and server.admin_api_key == "QUIRE_ADMIN_API_KEY"
    assert task.settings["enable_lora"] and server.allow_runtime_lora
    assert server.port == container()["ports"][0]["containerPort"]


def test_keys_come_from_a_secret_that_must_be_there() -> None:
    variables = {one["name"]: one for one in container()["env"]}
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"):
        assert "value" not in variables[name]
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert not reference.get("optional", False)
        text = (ROOT / "deploy/kubernetes.yaml").read_text()
        assert f"create secret generic {reference['name']}" in text
        assert f"--from-literal={reference['key']}=" in text
    assert not [one for one in documents() if one["kind"] == "Secret"]


def test_ports_lead_to_the_server() -> None:
    (port,) = container()["ports"]
    assert all(probe["port"] == port["name"] for probe in probes().values())
    assert document("Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])


def test_probes_need_no_key_and_metrics_does(server: LocalServer) -> None:
    assert {name: probe["path"] for name, probe in probes().items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    metrics = pod()["metadata"]["annotations"]["prometheus.io/path"]
    with server.http() as http:
        for probe in probes().values():
            assert http.get(probe["path"]).status_code == 200
        assert http.get(metrics).status_code == 401  # what the note at the annotations says
        assert http.get(metrics, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_the_pod_lives_until_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(ServerConfig, pod_task(monkeypatch).settings)
    (program, seconds) = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed = float(seconds) + config.shutdown_timeout + serve._LINGER
    assert pod()["spec"]["terminationGracePeriodSeconds"] > needed


def test_service_links_do_not_pass_for_options() -> None:
    """A Service of this name would set QUIRE_PORT=tcp://... in every pod, and the server would not start."""
    assert f"{document('Service')['metadata']['name'].upper()}_PORT" in serve_variables()
    assert pod()["spec"]["enableServiceLinks"] is False


def test_the_pod_may_do_little(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = pod()["spec"], container()["securityContext"]
    user, group = (int(part) for part in final("USER")[-1].split(":"))
    assert spec["automountServiceAccountToken"] is False
    assert (
        spec["securityContext"].items()
        >= {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items()
    )
    assert own == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    resources = container()["resources"]
    assert {"cpu", "memory"} <= resources["requests"].keys() and {"cpu", "memory"} <= resources["limits"].keys()

    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {image_variables()["HF_HOME"], "/tmp"}
    assert set(pod_task(monkeypatch).settings["lora_root"]) == mounts.keys() - writable


# -- Grafana --------------------------------------------------------------------------------------------------

WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "bool", "offset", "group_left", "group_right"}
OF_PROMETHEUS = {"instance", "job", "le"}  # labels that Prometheus adds, and buckets have


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana.json").read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    variables = [one for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    asked = [re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]["query"]) for one in variables]
    assert all(asked)
    return [
        *(target["expr"] for panel in panels() for target in panel["targets"]),
        *(f"count by ({found[2]}) ({found[1]})" for found in asked if found),
    ]


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """The series that an expression reads, and the labels that it speaks of."""
    text = re.sub(r'"[^"]*"', "", expression)
    labels = {
        label for inside in re.findall(r"\{([^}]*)\}", text) for label in re.findall(r"\w+(?=\s*(?:=|!))", inside)
    }
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", text)
    for clause in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", text):
        labels |= set(clause.replace(",", " ").split())
    text = re.sub(r"\b(by|on|without|ignoring) \([^)]*\)", "", text)
    names = set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", text))
    return names - WORDS, labels


@pytest.fixture(scope="module")
def samples(server: LocalServer) -> dict[str, list[Sample]]:
    """By family, what /metrics shows once an adapter has answered."""
    server.engine.llm_engine.load_lora_adapter("french", adapter_path("french"))
    with server.client() as client, server.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        client.completions.create(model="french", prompt="Once", max_tokens=4)
        http.get("/version")
        page = http.get("/metrics").text
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    # When each series began: Prometheus needs it for no rate.
    return {name: found for name, found in families.items() if not name.endswith("_created")}


def test_the_reading_of_expressions_sees_names_and_labels() -> None:
    assert names_and_labels(
        'sum by (le, a) (rate(x_bucket{i=~"$i", r!~"/y|z"}[$__rate_interval])) / (y{s="t"} > 0)'
    ) == (
        {"x_bucket", "y"},
        {"le", "a", "i", "r", "s"},
    )
    assert names_and_labels("a * 1000 and on (job) b_total") == ({"a", "b_total"}, {"job"})


def test_the_dashboard_reads_only_series_that_there_are(samples: dict[str, list[Sample]]) -> None:
    labels: dict[str, set[str]] = {}
    for family in samples.values():
        for sample in family:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        names, spoken_of = names_and_labels(expression)
        assert names and names <= labels.keys(), (expression, names - labels.keys())
        known = set().union(*(labels[name] for name in names)) | OF_PROMETHEUS
        assert spoken_of <= known, (expression, spoken_of - known)


def test_the_dashboard_shows_all_that_quire_tells(samples: dict[str, list[Sample]]) -> None:
    shown = set().union(*(names_and_labels(expression)[0] for expression in expressions()))
    families = {name: {one.name for one in found} for name, found in samples.items() if name.startswith("quire_")}
    assert len(families) > 20 and all(families.values())  # each has a sample, or it could not be compared
    assert {name for name, series in families.items() if not series & shown} == UNSHOWN.keys()


def test_legends_name_labels_that_are_left(samples: dict[str, list[Sample]]) -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            left = set(kept[1].replace(",", " ").split()) - {"le"} if kept else {"instance", "job"}
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= left, (panel["title"], named - left)
            assert target["legendFormat"]


def test_every_panel_is_described_and_has_its_place() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36 and board["title"] and board["uid"]
    sources = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    assert [(one["name"], one["query"]) for one in sources] == [("datasource", "prometheus")]
    source = {"type": "prometheus", "uid": f"${{{sources[0]['name']}}}"}
    assert all(one["datasource"] == source for one in board["templating"]["list"] if one["type"] == "query")
    for panel in panels():
        assert panel["title"] and panel["description"].endswith("."), panel["id"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(found == source for found in (panel["datasource"], *(one["datasource"] for one in panel["targets"])))
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"]) > 0
    everything = board["panels"]
    assert len({one["id"] for one in everything}) == len({one["title"] for one in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
