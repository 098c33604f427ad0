"""Weight store: how the weights that a trainer publishes reach the generators.

A keyframe is a version with all weights; a delta has only the changes since an earlier version. The
trainer's `publisher` writes versions through `store` to a backend (`backends`); a generator's
`subscriber` loads and verifies them in a thread, and applies them to `replica`, its local copy.
`locks`: files by which processes agree who publishes, and which versions are being read. `server`
serves a folder over HTTP. Formats: `delta`, `tensor_set` (safetensors).
docs/weights.md describes the protocol.
"""
