"""Environments: data sets, order of problems, reward functions, shipped tasks.

A task is a module with `problems(split, seed, **options)` and `reward(problem, completion_text)`;
for several turns also `reply(problem, messages)` or `tools`. docs/code.md has the order in which to
read the modules.
"""
