"""Weight store: how published weights reach the generators.

`publisher` runs in the trainer, `subscriber` with its `replica` in the generators. `store` keeps
the versions of `version`, complete or encoded by `delta`, in one of the `backends`: a folder,
`http_backend` or `object_store_backend`. `tensors` reads and writes safetensors files.
"""
