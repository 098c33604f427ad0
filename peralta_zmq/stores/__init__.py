"""Where weights go to reach the generators: `directory` now; watched by `watch`."""
