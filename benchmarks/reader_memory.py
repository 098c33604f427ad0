"""Peak memory of a process that reads published weights.

`python -m benchmarks.reader_memory WEIGHTS` advances a local copy to the last two versions and
prints the peak of the process's anonymous memory during that, in bytes.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore

STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous memory of this process, without mapped files."""
    lines = STATUS.read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """Load the version before the newest, then the newest as a delta."""
    store = WeightStore.open(sys.argv[1])
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    sampling = threading.Thread(target=sample)
    sampling.start()
    with tempfile.TemporaryDirectory(prefix="bench-reader-") as folder:
        replica = LocalReplica(Path(folder))
        for version in list(store.versions())[-2:]:
            replica.advance(store, version)
    done.set()
    sampling.join()
    sys.stdout.write(f"{peak - before}\n")


if __name__ == "__main__":
    main()
