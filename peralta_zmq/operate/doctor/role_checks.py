"""The checks of each role (trainer, generator), in the order of the output.

The doctor of a generator's machine sends probes, which a trainer or its machine's doctor answers.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack, closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from peralta_zmq import wire
from peralta_zmq.config import Config, earlier_config, with_fitted_of_run
from peralta_zmq.errors import PeraltaError, WireError, failure_text, program_name
from peralta_zmq.operate.doctor import machine_checks, network_checks, weights_checks
from peralta_zmq.operate.doctor.checks import Check, Report, failed_check

if TYPE_CHECKING:
    from peralta_zmq.memory import Role


def default_role(config: Config) -> str:
    return "trainer" if network_checks.is_this_machine(config.wire.host) else "generator"


def check_trainer(config: Config, report: Report, stack: ExitStack, *, serve: bool) -> bool:
    """Run the checks of the trainer's machine.

    With `serve`, a thread answers the doctors of generators until `stack` is closed, unless a
    trainer runs, which does that itself. Returns whether it does.
    """
    config = fitted(config, report)
    folder = _weights_folder(config)
    report.run("keys", network_checks.check_keys, config, "trainer")
    has_ports = report.run("ports", network_checks.check_ports, config, stack)
    is_running = network_checks.is_trainer_running(config.run_folder)
    serve = serve and has_ports and not is_running
    if serve:
        report.run("answers", network_checks.serve_probes, config, stack, folder)
    _check_machine(config, report, "trainer")
    report.run("run", _check_run, config)
    if folder is None:
        _check_address(config, report, reply=None)
        return serve
    check = report.run_with_timeout  # a check of a folder on a dead NAS never returns
    if check("weights", weights_checks.check_folder, folder, role="trainer"):
        if check("writing", weights_checks.check_writing, folder) and folder.is_dir():
            run = config.run_folder
            check("owner", weights_checks.check_owner, folder, run, is_running=is_running)
        model_bytes = weights_checks.model_bytes_of(config)
        check("space", weights_checks.check_space, folder, model_bytes, num_models=3)
        check("speed", weights_checks.check_speed, folder, model_bytes)
    return serve


def check_generator(
    config: Config, report: Report, stack: ExitStack, *, wait_seconds: float
) -> None:
    """Run the checks of a generator's machine and of the connection to the trainer.

    Retries for `wait_seconds` to connect.
    """
    config = fitted(config, report)
    _check_machine(config, report, "generator")
    report.run("localnet", machine_checks.check_local_network, platform.system(), config.wire.host)
    has_keys = report.run("keys", network_checks.check_keys, config, "generator")
    client = None
    reply = None
    is_up = report.run("reach", network_checks.check_reach, config, wait_seconds=wait_seconds)
    if is_up and has_keys:
        try:
            client = stack.enter_context(closing(network_checks.open_probe_client(config)))
            reply = _probe_trainer(config, report, client)
        except WireError as error:
            report.add("probe", failed_check(error))
    folder = _weights_folder(config)
    if folder is None:
        # A doctor replies before the trainer runs, which will serve this URL.
        if not (reply and reply.role == "doctor" and config.weights.serve_port):
            _check_address(config, report, reply=reply)
        return
    check = report.run_with_timeout
    if not check("weights", weights_checks.check_folder, folder, role="generator"):
        return
    if client and reply:
        check("visible", weights_checks.check_visible, folder, partial(_create_file, client))
    model_bytes = weights_checks.model_bytes_of(config)
    check("speed", weights_checks.check_speed, folder, model_bytes)
    replicas = config.run_folder / "copies"  # the generator's local replica of the weights
    check("space", weights_checks.check_space, replicas, model_bytes, num_models=2)


def fitted(config: Config, report: Report, memory_gib: float | None = None) -> Config:
    """The settings with the defaults that follow the model, which the report then has.

    Settings that cannot be chosen stay as they are: another check reports the reason.
    """
    from peralta_zmq.build import fitted_settings

    try:
        known = with_fitted_of_run(config)
        config, reasons = fitted_settings.fit_settings(known, memory_gib=memory_gib)
    except (PeraltaError, OSError):
        return config
    for name, reason in reasons.items():
        report.add("default", Check(True, f"{name} {attrgetter(name)(config)} ({reason})"))
    return config


def _check_machine(config: Config, report: Report, role: Role) -> None:
    has_battery = psutil.sensors_battery() is not None
    report.run("versions", machine_checks.check_installation)
    report.run("device", machine_checks.check_device, config)
    report.run("sleep", machine_checks.check_sleep, platform.system(), has_battery)
    opened = report.run("reward", machine_checks.check_reward, config)
    weights = role == "trainer"
    report.run("model", add_findings, config, report, role, weights=weights, prompts=opened)


def add_findings(
    config: Config, report: Report, role: Role, *, weights: bool, prompts: bool
) -> None:
    from peralta_zmq.build import dry_run

    findings = dry_run.check_run(config, role, with_weights=weights, with_prompts=prompts)
    for finding in findings:
        report.add(finding.name, Check(not finding.is_fatal, finding.detail, finding.remedy))


def _check_run(config: Config) -> Check | None:
    """Check that an existing run can be resumed; None for a new run. Raises ConfigError."""
    from peralta_zmq import models
    from peralta_zmq.trainer.session import check_tokenizer

    folder = config.run_folder
    try:
        if earlier_config(config, folder) is config:
            return None
    except OSError as error:
        detail = f"{error.filename or folder} cannot be read ({failure_text(error)})"
        return Check(False, detail, "mount it, or give this user the right to read it")
    model = models.model_folder(config.model.name)
    tokenizer = models.load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    check_tokenizer(config, models.tokenizer_identity(model, tokenizer))
    return Check(True, f"resumes in {folder}")


def _probe_trainer(
    config: Config, report: Report, client: wire.ProbeClient
) -> wire.ProbeReply | None:
    """Check the connection to the trainer's machine; None if another run listens there.

    Raises WireError without a reply.
    """
    result = network_checks.send_probes(client)
    if not report.add("probe", network_checks.check_probe(result, config.run.name)):
        return None
    report.run("clock", network_checks.check_clock, result)
    report.run("burst", network_checks.check_throughput, client)
    return result.reply


def _create_file(client: wire.ProbeClient) -> str:
    """Make the trainer's machine create a file in the weights folder; returns its name."""
    reply, _ = client.request("create_file", timeout=network_checks.PROBE_SECONDS)
    if reply.error:
        raise WireError(f"the trainer's machine: {reply.error}; run {program_name('doctor')} there")
    return reply.created_file


def _check_address(config: Config, report: Report, *, reply: wire.ProbeReply | None) -> None:
    """Run the checks of a weight store with a URL; `reply` is that of a probe."""
    address = config.weights_address
    token = config.security.token_file
    run_id = reply.run_id if reply else ""
    if report.run_with_timeout("weights", weights_checks.check_address, address, token, run_id):
        model_bytes = weights_checks.model_bytes_of(config)
        report.run_with_timeout("speed", weights_checks.check_speed, address, model_bytes, token)


def _weights_folder(config: Config) -> Path | None:
    return None if "://" in config.weights_address else config.weights_folder
