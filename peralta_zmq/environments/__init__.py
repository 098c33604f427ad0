"""Environments: data sets, the curriculum, reward functions, the verifier, and the shipped tasks.

A task is a module with `problems(split, seed, **options)` and `reward(problem, completion_text)`.
"""
