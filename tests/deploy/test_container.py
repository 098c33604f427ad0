"""The image of deploy/Containerfile, and the pods of deploy/kubernetes with it, without a cluster.

make test-container. Needs root, podman, runc, mmdebstrap, and the packages of Debian and PyPI. The
base image is made by mmdebstrap and gets the name in the FROM line, so no registry of images is
needed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_programs import Program, until

from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.wire.auth import make_keys
from tools.link_proxy import free_ports

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200)]
REPO = Path(__file__).parents[2]
IMAGE = "localhost/peralta-test"
GROUP = 10001  # fsGroup of the pods
STEPS = 2
SMALL = (
    *("--sampling.num-generations=4", "--train.batch-size=16", "--engine.slots=8"),
    *("--eval.num-examples=4", "--no-eval.eval-base-model", f"--train.max-steps={STEPS}"),
)
# runc works with any version of cgroups. By default podman raises limits, which may be forbidden.
PODMAN = ("podman", "--runtime=runc")
LIMITS = ("--network=host", "--ulimit=nproc=4096:4096", "--ulimit=nofile=4096:4096")
if os.getuid() != 0 or not all(map(shutil.which, ("podman", "runc", "mmdebstrap"))):
    reason = "needs root, podman, runc and mmdebstrap (Debian: apt install podman runc mmdebstrap)"
    pytestmark.append(pytest.mark.skip(reason=reason))


def podman(*words: str) -> str:
    """Run podman to its successful end; returns its standard output."""
    command = [*PODMAN, *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1100)
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built image."""
    file = REPO / "deploy/Containerfile"
    base = re.search(r"^FROM (\S+/debian:(\w+)-slim) ", file.read_text("utf-8"), re.MULTILINE)
    assert base is not None
    folder = tmp_path_factory.mktemp("base")
    archive = folder / "base.tar"
    subprocess.run(["mmdebstrap", "--variant=minbase", base[2], str(archive)], check=True)
    podman("import", str(archive), base[1])
    podman("build", "--pull=never", *LIMITS, "--file", str(file), "--tag", IMAGE,
           *_pip_options(folder), str(REPO))  # fmt: skip
    yield IMAGE
    podman("rmi", "--force", IMAGE, base[1])


def _pip_options(folder: Path) -> list[str]:
    """Let pip in the build use the certificates and the folder of wheels of pip on this machine."""
    settings, options = ["[global]"], list[str]()
    if certificates := os.environ.get("PIP_CERT"):
        shutil.copy(certificates, folder / "certificates")
        settings.append("cert = /pip/certificates")
    if links := os.environ.get("PIP_FIND_LINKS"):
        settings.append("find-links = /wheels")
        options += [f"--volume={links}:/wheels:ro", "--build-arg=TORCH=torch==2.13.0+cpu"]
    (folder / "pip.conf").write_text("\n".join(settings))
    return [
        *options, f"--volume={folder}:/pip:ro", f"--volume={folder / 'pip.conf'}:/etc/pip.conf:ro"
    ]  # fmt: skip


class Pod:
    """A pod of the example: volumes are folders, its containers run with its security settings."""

    def __init__(self, name: str, folder: Path, image: str, *, weights: Path) -> None:
        file = REPO / f"deploy/kubernetes/base/{name}.yaml"
        objects = [*yaml.safe_load_all(file.read_text("utf-8"))]
        [template] = [each["spec"]["template"] for each in objects if "template" in each["spec"]]
        self._spec: Any = template["spec"]
        self._name, self._image, self._weights = name, image, weights
        self.folder = folder / name
        for volume in ("run", "keys", "settings", "secrets", "tmp"):
            made = self.folder / volume
            made.mkdir(parents=True)
            shutil.chown(made, group=GROUP)
            made.chmod(0o2777)

    def add_secret(self, name: str, content: bytes) -> None:
        """Add a file to the volume `secrets`, with the mode that Kubernetes gives it."""
        file = self.folder / "secrets" / name
        file.write_bytes(content)
        shutil.chown(file, group=GROUP)
        file.chmod(0o440)

    def prepare(self) -> None:
        """Run the init container to its end."""
        subprocess.run(self._command(self._spec["initContainers"][0]), check=True, timeout=60)

    def start(self, *more: str) -> Program:
        """Start the main container with more settings."""
        command = self._command(self._spec["containers"][0], *more)
        return Program(command, self.folder.with_suffix(".log"), {})

    def _command(self, container: Any, *more: str) -> list[str]:
        pod, security = self._spec["securityContext"], container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"]["drop"] == ["ALL"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        return [
            *PODMAN, "run", "--rm", *LIMITS, "--read-only", "--cap-drop=all",
            "--security-opt=no-new-privileges", f"--user={pod['runAsUser']}:{pod['runAsGroup']}",
            f"--group-add={pod['fsGroup']}", f"--volume={self._weights}:/weights",
            *(f"--volume={self.folder / name}:{path}" for name, path in mounts.items()),
            *(f"--env={each['name']}={each['value']}" for each in container.get("env", ())),
            self._image, *container["args"], *more,
        ]  # fmt: skip


def test_pods_of_the_example_train_two_steps(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    keys, weights = tmp_path / "made_keys", tmp_path / "weights"
    make_keys(keys, "trainer")
    make_keys(keys, "pool")
    (keys / "dashboard-token").write_text(secrets.token_hex(32))
    weights.mkdir()
    weights.chmod(0o777)
    secret_files = {
        "trainer": ("trainer.secret", "pool.public", "dashboard-token"),
        "generator": ("trainer.public", "pool.secret"),
    }
    more = ("--wire.host=127.0.0.1", f"--wire.port={free_ports()}", *SMALL)
    pods = {name: Pod(name, tmp_path, image, weights=weights) for name in secret_files}
    for name, pod in pods.items():
        for variant, file in (("base", "settings.toml"), ("volume", "weights.toml")):
            shutil.copy(REPO / "deploy/kubernetes" / variant / file, pod.folder / "settings")
        for secret in secret_files[name]:
            pod.add_secret(secret, (keys / secret).read_bytes())
        pod.prepare()
    trainer = pods["trainer"].start(*more, f"--dashboard.port={free_ports()}")
    generator = pods["generator"].start(*more)
    assert trainer.wait(timeout=300) == 0, trainer.printed
    assert generator.wait(timeout=60) == 0, generator.printed
    rows = read_rows(pods["trainer"].folder / "run/cluster" / METRICS)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert (weights / f"cluster/step_{STEPS:08d}/STABLE").exists()
    assert "generator=pool" in generator.printed


def test_sigterm_ends_a_generator_that_waits(image: str, tmp_path: Path) -> None:
    settings = ("peralta-generator", f"--wire.port={free_ports()}")
    command = [*PODMAN, "run", "--name=waiting", *LIMITS, image, *settings]
    waiting = Program(command, tmp_path / "log", {})
    try:
        until(lambda: "waiting for trainer" in waiting.printed, waiting, seconds=90)
        started = time.monotonic()
        podman("stop", "--time=30", "waiting")
        assert time.monotonic() - started < 15
        assert podman("inspect", "--format={{.State.ExitCode}}", "waiting") == "143"  # SIGTERM
    finally:
        podman("rm", "--force", "waiting")
        waiting.kill()


def test_whole_run_in_one_container_trains_two_steps(image: str, tmp_path: Path) -> None:
    command = [*PODMAN, "run", "--rm", *LIMITS, image, "peralta-lan", "local"]
    run = Program([*command, f"--wire.port={free_ports()}", *SMALL], tmp_path / "log", {})
    assert run.wait(timeout=300) == 0, run.printed
    assert f"steps              {STEPS} in" in run.printed


WRITE = "touch /opt/peralta/x 2>/dev/null || echo refused"


def test_image_runs_as_a_user_without_privileges(image: str) -> None:
    assert podman("run", "--rm", *LIMITS, image, "id", "-u") == "10001"
    assert podman("run", "--rm", *LIMITS, image, "sh", "-c", WRITE) == "refused"
