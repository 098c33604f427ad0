"""C kernels of the decode loop with their Python bindings, compiled once per machine."""
