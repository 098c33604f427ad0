"""`bin/doctor`: check whether a machine is ready for a run, one line per check.

command          the command line, and `keygen`, which makes encryption keys
plan             `bin/doctor plan`: the memory that a run needs
role_checks      the checks of each role (trainer, generator), in order
machine_checks   versions, device, reward, sleep, the local network permission of a Mac
network_checks   ports, connection to the trainer, clocks, keys
weights_checks   the folder or URL of the published weights
checks           the result of a check, and the report that prints the results
"""

from peralta_zmq.operate.doctor.command import main

__all__ = ["main"]
