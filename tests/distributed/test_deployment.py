"""What a deployment is asked to be: the file, the command, KubeRay's manifest; and what replicas count, summed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from quire.cli.app import app
from quire.distributed import deploy as command
from quire.distributed.deployment import Deployment, read_deployment
from quire.distributed.scrape import summed
from quire.errors import QuireError

ROOT = Path(__file__).parents[2]


def test_a_file_has_settings_and_deploy() -> None:
    found = read_deployment({"port": 9000, "served-model-name": ["a"], "deploy": {"doors": 2, "replicas": {"max": 3}}})
    assert dict(found.settings) == {"port": 9000, "served_model_name": ["a"]}
    assert (found.doors, found.replicas.least, found.replicas.most) == (2, 1, 3)
    assert read_deployment({}) == Deployment()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prot": 1}, "prot: there is no such setting"),
        ({"port": "many"}, "port"),
        ({"port": 99999}, "port"),
        ({"uds": "x"}, "uds is not for replicas"),
        ({"lora_resolver": True}, "lora_resolver is not for replicas"),
        ({"deploy": []}, "deploy: must be a mapping"),
        ({"deploy": {"replica": {}}}, "deploy.replica: there is no such key; there are name, doors"),
        ({"deploy": {"replicas": {"least": 1}}}, "deploy.replicas.least: there is no such key; there are min, max"),
        ({"deploy": {"replicas": {"min": 2}}}, "min=2, max=1"),
        ({"deploy": {"replicas": {"min": -1}}}, "min=-1"),
        ({"deploy": {"replicas": {"max": "3"}}}, "deploy.replicas.max='3': must be of type int"),
        ({"deploy": {"replicas": {"max": True}}}, "must be of type int"),
        ({"deploy": {"replicas": {"initial": 5}}}, "initial=5"),
        ({"deploy": {"replicas": {"cpus": 0}}}, "cpus=0.0: must be above 0"),
        ({"deploy": {"replicas": {"drain_s": float("nan")}}}, "drain_s"),
        ({"deploy": {"replicas": {"resources": 3}}}, "must be of type dict"),
        ({"deploy": {"doors": 0}}, "doors=0"),
        ({"deploy": {"name": 5}}, "deploy.name=5: must be of type str"),
    ],
)
def test_what_there_is_not_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(QuireError, match=message.replace("[", r"\[")):
        read_deployment(given)


def test_keys_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one")
    assert read_deployment({}).settings == {"api_key": ["one"]}
    assert read_deployment({"api_key": ["two"]}).settings == {"api_key": ["two"]}


def test_the_command_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("port: 9000\nlora-root: [a, b]\ndeploy: {name: n, replicas: {max: 2}}\n")
    seen: list[Deployment] = []
    monkeypatch.setattr(command, "connect", lambda address, stays: None)
    monkeypatch.setattr(command, "start", lambda plan: seen.append(plan) or "http://here")
    result = CliRunner().invoke(app, ["deploy", str(tmp_path / "config.yaml"), "--detach", "--max-num-seqs", "4"])
    assert result.exit_code == 0, result.output
    assert seen[0].settings["port"] == 9000 and seen[0].settings["lora_root"] == ["a", "b"]
    assert seen[0].settings["max_num_seqs"] == 4 and seen[0].name == "n" and seen[0].replicas.most == 2


@pytest.mark.parametrize("words", [["--deploy", "{"], ["--deploy", "[]"], ["--uds", "x"], ["nowhere.yaml"]])
def test_the_command_refuses_in_one_line(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["deploy", *words])
    assert result.exit_code in (1, 2) and "Traceback" not in result.output + result.stderr


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["deploy"])
    assert result.exit_code == 1 and "pip install 'quire-llm[ray]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--detach"], ["--delete"]])
def test_what_outlives_the_command_needs_a_cluster_that_does(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str, **settings: Any) -> None:
        assert address == "auto"
        raise ConnectionError("no cluster")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, serve=None))
    monkeypatch.setitem(sys.modules, "ray.serve", SimpleNamespace())
    result = CliRunner().invoke(app, ["deploy", *words], env={"RAY_ADDRESS": ""})
    assert result.exit_code == 1 and "`ray start --head` starts one" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_manifest_is_what_is_taken() -> None:
    service, door, policy = yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(" in text  # which needs Ray to be imported
    wanted = read_deployment(application["args"])
    (head,) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in head["ports"]}
    assert ports["door"] == wanted.settings["port"] == door["spec"]["ports"][0]["port"]
    assert [one["port"] for one in policy["spec"]["ingress"][1]["ports"]] == [ports["door"]]
    assert ports["serve"] == config["http_options"]["port"]
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (engine,) = workers["template"]["spec"]["containers"]
    assert float(engine["resources"]["limits"]["cpu"]) >= wanted.replicas.cpus
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > wanted.replicas.drain


def test_metrics_are_summed() -> None:
    text = (
        "# HELP quire_tokens_total Tokens.\n# TYPE quire_tokens_total counter\n"
        'quire_tokens_total{kind="a"} 3.0\nquire_tokens_total{kind="b"} 4.0\n'
        "# HELP quire_wait Seconds.\n# TYPE quire_wait histogram\n"
        'quire_wait_bucket{le="1.0"} 2.0\nquire_wait_bucket{le="+Inf"} 3.0\nquire_wait_count 3.0\nquire_wait_sum 2.5\n'
    )
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(summed({"one": text, "two": text}).decode())
        for sample in family.samples
    }
    assert found["quire_tokens_total", (("kind", "a"),)] == 6.0
    assert found["quire_tokens_total", (("kind", "b"), ("replica", "two"))] == 4.0
    assert found["quire_wait_bucket", (("le", "1.0"),)] == 4.0 and found["quire_wait_sum", ()] == 5.0
    assert found["quire_wait_count", (("replica", "one"),)] == 3.0
    assert summed({}) == b""
