"""Where weights go to reach the generators.

publisher   the trainer's side: snapshot, then encode, write and prune in a thread
follow      the generator's side: watch, fetch, verify and stage in a thread
store       versions, chains of deltas, what may be removed; over any `place`
place       where folders lie: `folder`, `http` (served by `serve`), `objects` (a bucket)
delta       what changed between two versions, without loss
tensors     sets of tensors as safetensors files
"""
