"""Engine on MLX: decode loop with mlx-lm's models, for Macs, and for tests on a Linux CPU."""
