"""Programs for the development of peralta_zmq; not part of the wheel."""
