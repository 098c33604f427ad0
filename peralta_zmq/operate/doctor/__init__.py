"""`bin/doctor`: check whether a machine is ready for a run, one line per check."""

from peralta_zmq.operate.doctor.command import main

__all__ = ["main"]
