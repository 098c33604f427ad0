"""`python -m peralta_zmq.observe.dashboard RUN`, where there is no bin/."""

import sys

from peralta_zmq.observe.dashboard.door import start

sys.exit(start())
