"""Weight store: how the weights that a trainer publishes reach the generators.

Trainer: `publisher` (a thread that writes deltas and keyframes) -> `store` -> a backend; `pruning`
removes old versions. Generator: `subscriber` (a thread that finds, loads and verifies versions) ->
`store` and `replica` (local copy, updated by deltas).

`backends` has the storage interface and folders, `http_backend` and `object_store_backend` other
storage, `leases` the files with which processes coordinate. `version` defines a version's manifest,
`delta` the encoding of changes, `tensor_set` safetensors files. docs/weights.md has the protocol.
"""
