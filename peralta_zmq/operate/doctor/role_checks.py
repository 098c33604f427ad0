"""The checks of each role (trainer, generator), in the order in which they are printed.

The machine of a generator is checked together with its connection: the doctor on the trainer's
machine, or a running trainer, answers the probes of the generator's doctor.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil

from peralta_zmq import wire
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.errors import ConfigError, WireError
from peralta_zmq.operate.doctor import machine_checks, network_checks, weights_checks
from peralta_zmq.operate.doctor.checks import Check, Report, failed_check


def default_role(config: Config) -> str:
    """Trainer if wire.host is this machine, else generator."""
    return "trainer" if network_checks.is_this_machine(config.wire.host) else "generator"


def check_trainer(config: Config, report: Report, stack: ExitStack, *, serve: bool) -> bool:
    """Run the checks of the trainer's machine.

    With `serve`, a thread answers the doctors of generators until `stack` is closed. Returns True
    if it does; it does not while a trainer of this run is running, which answers them itself.
    """
    folder, run = _weights_folder(config), config.run_folder
    model_bytes = weights_checks.model_bytes_of(config)
    report.run("keys", network_checks.check_keys, config, "trainer", "trainer")
    has_ports = report.run("ports", network_checks.check_ports, config, stack)
    trainer_runs = network_checks.trainer_runs(run)
    serve = serve and has_ports and not trainer_runs
    if serve:
        worker_info = _worker_info(config)
        report.run("answers", network_checks.serve_probes, config, stack, folder, worker_info)
    _check_machine(config, report)
    report.run("model", machine_checks.check_model, config)
    report.run("reward", machine_checks.check_reward, config)
    report.run("run", _check_run, config)
    if folder is None:
        _check_address(config, report, model_bytes, reply=None)
        return serve
    check = report.run_on_mount
    if check("weights", weights_checks.check_folder, folder, role="trainer"):
        if check("writing", weights_checks.check_writing, folder) and folder.is_dir():
            check("owner", weights_checks.check_owner, folder, run, trainer_runs=trainer_runs)
        check("space", weights_checks.check_space, folder, model_bytes)
        check("speed", weights_checks.check_speed, folder, model_bytes)
    return serve


def check_generator(
    config: Config, report: Report, stack: ExitStack, *, wait_seconds: float
) -> None:
    """Run the checks of a generator's machine and of its connection to the trainer."""
    name = config.generator.full_name
    _check_machine(config, report)
    system, host = platform.system(), config.wire.host
    report.run("localnet", machine_checks.check_local_network, system, host)
    report.run("reward", machine_checks.check_reward, config)
    has_keys = report.run("keys", network_checks.check_keys, config, "generator", name)
    reached = report.run("reach", network_checks.check_reach, config, wait_seconds=wait_seconds)
    client = reply = None
    if reached and has_keys:
        client = stack.enter_context(closing(network_checks.open_probe_client(config, name)))
        reply = _probe_trainer(config, report, client)
    folder, model_bytes = _weights_folder(config), weights_checks.model_bytes_of(config)
    if folder is None:
        _check_address(config, report, model_bytes, reply=reply)
        return
    check = report.run_on_mount
    if not check("weights", weights_checks.check_folder, folder, role="generator"):
        return
    if client and reply:
        check("visible", weights_checks.check_visible, folder, partial(_create_file, client))
    check("speed", weights_checks.check_speed, folder, model_bytes)
    copies, num_models = config.run_folder / "copies", weights_checks.NUM_REPLICAS
    check("space", weights_checks.check_space, copies, model_bytes, num_models)


def _check_machine(config: Config, report: Report) -> None:
    has_battery = psutil.sensors_battery() is not None
    report.run("versions", machine_checks.check_versions, *machine_checks.this_python())
    report.run("device", machine_checks.check_device, config)
    report.run("sleep", machine_checks.check_sleep, platform.system(), has_battery)


def _check_run(config: Config) -> Check | None:
    """Check that an existing run can be resumed. Raises ConfigError if its settings differ."""
    folder = config.run_folder
    is_resumed = earlier_config(config, folder) is not config
    return Check(True, f"resumes in {folder}") if is_resumed else None


def _probe_trainer(
    config: Config, report: Report, client: wire.ProbeClient
) -> wire.ProbeReply | None:
    """Check the answers of the trainer's machine; returns its reply, None for another run."""
    try:
        result = network_checks.send_probes(client)
    except WireError as error:
        report.add("probe", failed_check(error))
        return None
    if not report.add("probe", network_checks.check_probe(result, config.run.name)):
        return None
    report.run("clock", network_checks.check_clock, result)
    report.run("burst", network_checks.check_throughput, client)
    return result.reply


def _create_file(client: wire.ProbeClient) -> str:
    """Let the trainer's machine create a file in its weights folder; returns the file's name.

    Raises WireError if no file was created.
    """
    reply, _ = client.request("create_file", timeout=network_checks.PROBE_SECONDS)
    if reply.error:
        raise WireError(f"the trainer's machine: {reply.error}; run bin/doctor there")
    return reply.created_file


def _check_address(
    config: Config, report: Report, model_bytes: int | None, *, reply: wire.ProbeReply | None
) -> None:
    """Run the checks of a weight store with a URL; `reply` is the answer of the trainer, if any."""
    address, token = config.weights_address, config.weights.token_file
    port, run_id = config.weights.serve_port, reply.run_id if reply else ""
    if reply and reply.role == "doctor" and port and address.startswith("http://"):
        report.run("weights", weights_checks.check_future_address, address, token, port)
        return
    check = report.run_on_mount
    if check("weights", weights_checks.check_address, address, token, run_id):
        check("speed", weights_checks.check_speed, address, model_bytes, token)


def _weights_folder(config: Config) -> Path | None:
    """The folder of the weight store; None for a weight store with a URL."""
    return None if "://" in config.weights_address else config.weights_folder


def _worker_info(config: Config) -> dict[str, str]:
    """Versions and device of this machine, for the reply to probes; empty without the device."""
    from peralta_zmq import models

    with suppress(ConfigError):
        device = models.choose_device(config.model.device)
        return models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    return {}
