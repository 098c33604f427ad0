"""The checks of each role, in order; and those of the model and the reward."""

from __future__ import annotations

import platform
import socket
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil

from peralta_zmq import wire
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.errors import ConfigError, WireError
from peralta_zmq.operate.doctor import machine_checks, network_checks, weights_checks
from peralta_zmq.operate.doctor.checks import Check, Report


def default_role(config: Config) -> str:
    """Trainer if wire.host is this machine, else generator."""
    return "trainer" if network_checks.is_this_machine(config.wire.host) else "generator"


def check_trainer(config: Config, report: Report, stack: ExitStack, *, serve: bool) -> bool:
    """Run the checks of the trainer's machine.

    With `serve`, other doctors are answered until the stack is closed; returns True if they are,
    which a running trainer does itself.
    """
    folder, model_bytes, run = _weights_folder(config), model_bytes_of(config), config.run_folder
    report.run("keys", network_checks.check_keys, config, "trainer", "trainer")
    has_ports = report.run("ports", network_checks.check_ports, config, stack)
    trainer_runs = network_checks.trainer_runs(run)
    serve = serve and has_ports and not trainer_runs
    if serve:
        worker_info = _worker_info(config)
        report.run("answers", network_checks.serve_probes, config, stack, folder, worker_info)
    _check_machine(config, report)
    report.run("model", check_model, config)
    report.run("reward", check_reward, config)
    report.run("run", _check_run, config)
    if folder is None:
        _check_address(config, report, model_bytes, reply=None)
        return serve
    check = report.run_on_mount
    if check("weights", weights_checks.check_folder, folder, role="trainer"):
        writable = check("writing", weights_checks.check_writing, folder)
        if writable and folder.is_dir():
            check("owner", weights_checks.check_owner, folder, run, trainer_runs=trainer_runs)
        check("space", weights_checks.check_space, folder, model_bytes)
        check("speed", weights_checks.check_speed, folder, model_bytes)
    return serve


def check_generator(
    config: Config, report: Report, stack: ExitStack, *, wait_seconds: float
) -> None:
    """Run the checks of a generator's machine and of its connection to the trainer."""
    name = config.generator.name or f"{socket.gethostname()}-{config.generator.index}"
    _check_machine(config, report)
    send = machine_checks.packet_sender(config.wire.host)
    report.run("localnet", machine_checks.check_local_network, platform.system(), send)
    report.run("reward", check_reward, config)
    has_keys = report.run("keys", network_checks.check_keys, config, "generator", name)
    reached = report.run("reach", network_checks.check_reach, config, wait_seconds=wait_seconds)
    client = reply = None
    if reached and has_keys:
        client = stack.enter_context(closing(network_checks.open_probe_client(config, name)))
        reply = _probe_trainer(config, report, client)
    folder, model_bytes = _weights_folder(config), model_bytes_of(config)
    if folder is None:
        _check_address(config, report, model_bytes, reply=reply)
        return
    check = report.run_on_mount
    if not check("weights", weights_checks.check_folder, folder, role="generator"):
        return
    if client and reply:
        create_file, poll_seconds = partial(_create_file, client), config.weights.poll_seconds
        check("visible", weights_checks.check_visible, folder, create_file, poll_seconds)
    check("speed", weights_checks.check_speed, folder, model_bytes)
    copies, num_models = config.run_folder / "copies", weights_checks.NUM_REPLICAS
    check("space", weights_checks.check_space, copies, model_bytes, num_models)


def _check_machine(config: Config, report: Report) -> None:
    run_command, on_battery = machine_checks.output_of, psutil.sensors_battery() is not None
    report.run("versions", machine_checks.check_versions, *machine_checks.this_python())
    report.run("device", machine_checks.check_device, config)
    report.run("sleep", machine_checks.check_sleep, platform.system(), run_command, on_battery)


def check_model(config: Config) -> Check:
    """Check that the trainer's model loads without a network. Raises ConfigError."""
    from peralta_zmq import models

    started, folder = time.monotonic(), models.model_folder(config.model.name)
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(
        folder, device=models.choose_device(config.model.device), dtype=models.DTYPES["float32"]
    )
    size = f"{model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens"
    seconds = time.monotonic() - started
    return Check(True, f"{config.model.name}: {size}, loaded offline in {seconds:.1f} s")


def check_reward(config: Config) -> Check:
    """Open every environment and score one correct answer. Raises ConfigError or TaskError."""
    from peralta_zmq.build import open_environments

    details: list[str] = []
    with closing(open_environments(config, "train")) as environments:
        for name, size in environments.sizes.items():
            problem = next(each for each in environments.problems if each.task == name)
            environments.reward(problem, problem.answer)  # starts the reward processes
            started = time.monotonic()
            reward = environments.reward(problem, problem.answer)
            seconds = time.monotonic() - started
            total = sum(reward.values()) if isinstance(reward, dict) else reward
            example = f"the answer {problem.answer[:20]!r} earns {total:g}"
            details.append(f"{name}: {size} problems, {example} in {1e3 * seconds:.1f} ms")
    return Check(True, "; ".join(details))


def _check_run(config: Config) -> Check | None:
    """Check that the run in the folder can resume. Raises ConfigError for other settings."""
    folder = config.run_folder
    is_resumed = earlier_config(config, folder) is not config
    return Check(True, f"resumes in {folder}") if is_resumed else None


def _probe_trainer(
    config: Config, report: Report, client: wire.ProbeClient
) -> wire.ProbeReply | None:
    """The trainer's reply, if it is of our run."""
    results: list[network_checks.ProbeResult] = []

    def check_probe() -> Check:
        results.append(network_checks.send_probes(client))
        return network_checks.check_probe(results[0], config.run.name)

    if not report.run("probe", check_probe):
        return None
    report.run("clock", network_checks.check_clock, results[0])
    report.run("burst", network_checks.check_throughput, client)
    return results[0].reply


def _create_file(client: wire.ProbeClient) -> tuple[str, str]:
    """Let the trainer's machine create a file in its weights folder: its name, or an error."""
    try:
        reply, _ = client.request("create_file", timeout=network_checks.PROBE_SECONDS)
    except WireError as error:
        return "", str(error)
    return reply.created_file, reply.error


def _check_address(
    config: Config, report: Report, model_bytes: int | None, *, reply: wire.ProbeReply | None
) -> None:
    """Run the checks of weights behind a URL."""
    address, token = config.weights_address, config.weights.token_file
    port, run_id = config.weights.serve_port, reply.run_id if reply else ""
    if reply and reply.role == "doctor" and port and address.startswith("http://"):
        report.run("weights", weights_checks.check_future_address, address, token, port)
        return
    check = report.run_on_mount
    if check("weights", weights_checks.check_address, address, token, run_id):
        check("speed", weights_checks.check_speed, address, model_bytes, token)


def _weights_folder(config: Config) -> Path | None:
    """The weights folder; None for weights behind a URL."""
    return None if "://" in config.weights_address else config.weights_folder


def model_bytes_of(config: Config) -> int | None:
    """Bytes of a published model; None if the model is not on this machine."""
    from peralta_zmq import models

    with suppress(ConfigError, OSError, ValueError):
        folder = models.model_folder(config.model.name)
        return weights_checks.model_bytes_of(folder, dtype=config.weights.dtype)
    return None


def _worker_info(config: Config) -> dict[str, str]:
    """Worker info of this machine; empty without the configured device."""
    from peralta_zmq import models

    with suppress(ConfigError):
        device = models.choose_device(config.model.device)
        return models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    return {}
