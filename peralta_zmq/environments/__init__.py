"""Environments: data sets, order of problems, reward functions, shipped tasks.

A task is a module with `problems(split, seed, **options)` and `reward(problem, completion_text)`;
for several turns also `reply(problem, messages)` or `tools`.

dataset, data_files   the environments of a run; the rows of CSV, JSONL, Parquet files and folders
curriculum, held_out  order and pools of training problems; evaluation on held-out problems
reward_functions      signatures, calls and results of reward functions
reward_pool, reward_worker, tool_process  processes that call reward functions, replies and tools
turns, tool_calls     replies of a task and its tools; schemas and calls of tools
verifier_service, verifier_client  problems and rewards on other machines (bin/verifier)
shipped_rewards, answer_match  reward functions for any task
rows_task, calculator, countdown, extract, math_answers, reverse_text  shipped tasks, one turn
guess_number, calculator_tool  shipped tasks with several turns, or with a tool
reasoning_gym_task, verifiers_task, verifiers_replay  tasks of other libraries
arithmetic            safe evaluation of arithmetic
"""
