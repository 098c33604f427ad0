"""Native engine: decode loop with its own KV cache and C kernels for decoder models."""
