"""A program of bin/ whose ranks shard the parameters (FSDP2) on CPUs, as they do on CUDA.

PYTHONPATH=.:tests/support torchrun ... tests/support/sharded_program.py trainer|replay ARGUMENTS
"""

from __future__ import annotations

import sys

from local_ranks import join_sharded

from peralta_zmq.config import programs
from peralta_zmq.learning import distributed

if __name__ == "__main__":
    distributed.join = join_sharded
    name = sys.argv.pop(1)
    sys.exit({"trainer": programs.trainer, "replay": programs.replay}[name]())
