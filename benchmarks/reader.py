"""How much memory a reader of published weights needs, in a process of its own.

`python -m benchmarks.reader WEIGHTS` follows the versions there, the newest last, as a generator
does, and prints the most bytes of memory of its own (no mapped files) that this took.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore

STATUS = Path("/proc/self/status")


def own_bytes() -> int:
    """Anonymous memory of this process."""
    lines = STATUS.read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """The chain's last version but one, then the newest as a delta."""
    store = WeightStore.open(Path(sys.argv[1]))
    before, peak, ended = own_bytes(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], own_bytes())

    sampling = threading.Thread(target=sample)
    sampling.start()
    with tempfile.TemporaryDirectory(prefix="bench-reader-") as folder:
        copy = LocalReplica(Path(folder))
        for version in store.versions()[-2:]:
            copy.advance(store, version)
    ended.set()
    sampling.join()
    sys.stdout.write(f"{peak[0] - before}\n")


if __name__ == "__main__":
    main()
