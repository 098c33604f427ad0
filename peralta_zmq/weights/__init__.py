"""Weight store: how the weights that a trainer publishes reach the generators.

A keyframe is a version with all weights; a delta has only the changes since an earlier version.

- The trainer: `publisher` writes versions in a thread, through `store`, to a backend; `pruning`
  removes old versions.
- A generator: `subscriber` finds, loads and verifies versions in a thread. It reads them through
  `store` and applies them to `replica`, the local copy, which deltas update.
- Backends: `backends` defines their interface and the one for folders; `http_backend` reads from
  a trainer's HTTP `server`, `object_store_backend` uses S3.
- `leases`: files by which processes agree who publishes, and which versions are being read.
- Formats: `version` (manifest), `delta` (encoded changes), `tensor_set` (safetensors files).

docs/weights.md describes the protocol.
"""
