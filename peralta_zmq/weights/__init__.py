"""Weight store: how the weights that a trainer publishes reach the generators.

A keyframe is a version with all weights; a delta has only the changes since an earlier version.
Trainer: `publisher` (a thread that writes versions) -> `store` -> a backend; `pruning` removes old
versions. Generator: `subscriber` (a thread that finds, loads and verifies versions) -> `store` and
`replica` (local copy, updated by deltas).

`backends` has the interface of all backends and the backend for folders; `http_backend` and
`object_store_backend` are for other storage. `leases` has the files with which processes
coordinate, `version` the fields of a version's manifest, `delta` the encoding of changes,
`tensor_set` safetensors files. docs/weights.md has the protocol.
"""
