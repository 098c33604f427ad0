"""The Kubernetes example: valid for the API, and consistent with the programs.

make test-kubernetes installs kubernetes-validate, which has the schemas of the API, and runs
these tests. The two variants are rendered by `kubectl kustomize`, which needs no cluster.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from peralta_zmq.config import load_config
from peralta_zmq.observe.metrics import read_toml
from peralta_zmq.observe.prometheus import MEANINGS, exposition
from peralta_zmq.trainer.generator_registry import RegistryLimits

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "deploy/kubernetes"
PAGE = (REPO / "docs/containers.md").read_text("utf-8")
VARIANTS = ("volume", "s3")
API_VERSIONS = ("1.29", "1.37")  # oldest and newest checked
Objects = dict[tuple[str, str], Any]  # (kind, name) -> object


def by_name(objects: Sequence[Any]) -> Objects:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects if each}


def rendered(variant: str) -> Objects:
    """All objects of a variant, as `kubectl apply -k` sends them."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl on this machine")
    command = ["kubectl", "kustomize", str(EXAMPLE / variant)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return by_name(list(yaml.safe_load_all(text)))


def in_files() -> Objects:
    """The objects as in the files, without the patches of the variants."""
    files = [file for file in EXAMPLE.glob("*/*.yaml") if file.stem != "kustomization"]
    return by_name([each for file in files for each in yaml.safe_load_all(file.read_text("utf-8"))])


def pods(objects: Objects) -> dict[str, Any]:
    """The pod template of each workload, by its name."""
    found = {
        name: each["spec"]["template"]["spec"]
        for (kind, name), each in objects.items()
        if kind in ("StatefulSet", "Deployment")
    }
    assert found.keys() == {"trainer", "generator"}
    return found


def containers(objects: Objects) -> Iterator[tuple[Any, Any]]:
    """Each container with its pod."""
    for pod in pods(objects).values():
        for container in (*pod["initContainers"], *pod["containers"]):
            yield pod, container


def schemas() -> Any:
    reason = "needs kubernetes-validate: make test-kubernetes"
    return pytest.importorskip("kubernetes_validate", reason=reason)


@pytest.mark.parametrize("version", API_VERSIONS)
def test_manifests_are_valid_for_the_api(version: str) -> None:
    kubernetes = schemas()
    for each in in_files().values():
        kubernetes.validate(each, version, strict=True)
    misspelt = deepcopy(in_files()["Deployment", "generator"])
    misspelt["spec"]["template"]["spec"]["terminationGracePeriod"] = 10
    with pytest.raises(kubernetes.ValidationError, match="terminationGracePeriod"):
        kubernetes.validate(misspelt, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rendered_variant_is_valid_and_mounts_only_volumes_that_exist(variant: str) -> None:
    kubernetes = schemas()
    objects = rendered(variant)
    for each in objects.values():
        kubernetes.validate(each, API_VERSIONS[-1], strict=True)
    claims = {name for kind, name in objects if kind == "PersistentVolumeClaim"}
    templates = objects["StatefulSet", "trainer"]["spec"]["volumeClaimTemplates"]
    claims |= {each["metadata"]["name"] for each in templates}
    for pod, container in containers(objects):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            claim = volumes.get(mount["name"], {}).get("persistentVolumeClaim")
            assert mount["name"] in volumes or mount["name"] in claims
            assert claim is None or claim["claimName"] in claims
    has_volume = ("PersistentVolumeClaim", "weights") in objects
    assert has_volume == (variant == "volume")
    for pod in pods(objects).values():
        variables = pod["containers"][0].get("envFrom", [])
        assert bool(variables) == (variant == "s3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_are_accepted_and_agree_with_the_manifests(variant: str) -> None:
    files = [str(EXAMPLE / "base/settings.toml"), str(EXAMPLE / variant / "weights.toml")]
    config = load_config("peralta-trainer", ["@", files[0], "@", files[1]])
    objects = in_files()
    service = objects["Service", "trainer"]
    assert config.wire.host == service["metadata"]["name"]
    ports = [port["port"] for port in service["spec"]["ports"]]
    assert ports == [*range(config.wire.port, config.wire.port + 4), config.dashboard.port]
    policy = objects["NetworkPolicy", "trainer"]["spec"]["ingress"]
    assert policy[0]["ports"] == [{"port": config.wire.port, "endPort": config.wire.port + 3}]
    assert policy[1]["ports"] == [{"port": config.dashboard.port}]
    [trainer] = pods(objects)["trainer"]["containers"]
    mounts = {mount["mountPath"] for mount in trainer["volumeMounts"]}
    assert str(config.run.dir) in mounts
    assert str(Path(str(config.security.keys)).parent) in mounts
    assert str(Path(str(config.dashboard.token_file)).parent) == config.security.keys


def test_pods_run_an_installed_program_as_the_user_of_the_image() -> None:
    image = (REPO / "deploy/Containerfile").read_text("utf-8")
    user = re.search(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    assert user is not None
    scripts = read_toml(REPO / "pyproject.toml")["project"]["scripts"]
    for name, pod in pods(in_files()).items():
        security = pod["securityContext"]
        assert [str(security["runAsUser"]), str(security["runAsGroup"])] == [*user.groups()]
        assert security["runAsNonRoot"] is True
        program, *settings = pod["containers"][0]["args"]  # `command` would replace tini
        assert program == f"peralta-{name}" and program in scripts
        given = [re.sub("^/settings", str(EXAMPLE / "base"), word) for word in settings]
        load_config(program, [*given[:2], *given[4:]])
    for _, container in containers(in_files()):
        assert "command" not in container
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_autoscaler_uses_exported_metrics_and_leaves_room_for_an_update() -> None:
    scaler = in_files()["HorizontalPodAutoscaler", "generator"]["spec"]
    deployment = in_files()["Deployment", "generator"]["spec"]
    update = deployment["strategy"]["rollingUpdate"]
    assert update["maxSurge"] == 0
    replaced = ceil(scaler["maxReplicas"] * int(update["maxUnavailable"].rstrip("%")) / 100)
    assert scaler["maxReplicas"] + replaced <= RegistryLimits().max_starts
    assert (
        deployment["minReadySeconds"] > RegistryLimits().live_seconds
    )  # then they are no longer counted
    metric = scaler["metrics"][0]["external"]["metric"]["name"]
    rule = adapter_rule()
    assert rule["name"]["as"] == metric
    exported = exposition({"run": {name: 1.0 for name in MEANINGS}})
    used = set(re.findall(r"peralta_\w+", rule["metricsQuery"] + rule["seriesQuery"]))
    names = ("queue_depth", "num_groups", "time", "step_time")
    assert used == {f"peralta_{name}" for name in names}
    assert rule["metricsQuery"].startswith("max(")  # the autoscaler adds up all series
    assert all(f"\n{name}{{" in exported for name in used)


def adapter_rule() -> Any:
    """The rule of prometheus-adapter that computes the metric of the autoscaler."""
    text = PAGE.partition("```yaml\nrules:")[2].partition("```")[0]
    [rule] = yaml.safe_load(text)["external"]
    return rule


# The last one: no step for ten minutes.
@pytest.mark.parametrize(
    ("depth", "end_of_step", "expected"),
    [("9", "0+30", 0.0), ("1", "0+30", 0.75), ("4", "600+0", 1.0)],
)
def test_autoscaler_metric_is_the_missing_share(
    tmp_path: Path, depth: str, end_of_step: str, expected: float
) -> None:
    if not shutil.which("promtool"):
        pytest.skip("no promtool on this machine (Debian: apt install prometheus)")
    query = adapter_rule()["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="n"')
    values = {"queue_depth": f"{depth}+0", "num_groups": "4+0", "step_time": "30+0",
              "time": end_of_step}  # fmt: skip
    series = [
        {"series": f'peralta_{name}{{namespace="n", run="r", pod="{pod}"}}', "values": f"{row}x40"}
        for name, row in values.items()
        for pod in ("trainer-0", "before the restart")
    ]
    sample = {"labels": "{}", "value": expected}
    expectation = {"expr": query, "eval_time": "20m", "exp_samples": [sample]}
    case = {"interval": "30s", "input_series": series, "promql_expr_test": [expectation]}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"tests": [case]}))
    command = ["promtool", "test", "rules", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_page_creates_every_secret_that_the_pods_use() -> None:
    sources = "".join(file.read_text("utf-8") for file in EXAMPLE.glob("*/*.yaml"))
    used = set(re.findall(r"secret(?:Ref)?: \{ (?:secretN|n)ame: ([\w-]+)", sources))
    assert used == {"trainer-keys", "generator-keys", "dashboard", "object-store"}
    assert used == set(re.findall(r"create secret generic ([\w-]+)", PAGE))
