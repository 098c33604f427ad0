"""`bin/doctor`: check a machine for a run, one line per check.

command          the command line, and keygen
role_checks      which checks belong to which role; the model and the reward
machine_checks   versions, device, sleep, the local network of a Mac
network_checks   ports, connection to the trainer, clocks, keys
weights_checks   the weights folder
checks           the result of a check, and the report
"""

from peralta_zmq.operate.doctor.command import main

__all__ = ["main"]
