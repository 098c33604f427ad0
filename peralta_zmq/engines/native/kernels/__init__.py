"""C kernels of the decode loop, compiled when a machine first uses them."""
