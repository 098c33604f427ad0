"""Environments: data sets, order of problems, reward functions, shipped tasks.

A task is a module with `problems(split, seed, **options)` and `reward(problem, completion_text)`;
for several turns also `reply(problem, messages)` or `tools`.

dataset           the environments of a run, and the problems of a data set
data_files        the rows of data sets in CSV, JSONL and Parquet files
curriculum        order of problems, assignment to generators, pools of easy and hard problems
held_out          evaluation on held-out problems: assignment, answers, metrics
reward_functions  calls of reward functions, and the checks of what they return
reward_pool       worker processes that call reward functions, each with a timeout
reward_worker     main module of such a process
turns             calls of `reply` and tools in these processes
tool_calls        schemas of tools, and the calls of tools in completions
tool_process      execution of tools with limits on their resources
verifier_service  serves problems and rewards to other machines (bin/verifier)
verifier_client   an environment that a verifier on another machine serves
shipped_rewards   reward functions for any task
calculator, countdown, extract, math_answers, reverse_text  shipped tasks with one turn
guess_number, calculator_tool  shipped tasks with several turns, or with a tool
reasoning_gym_task  tasks of the library reasoning-gym
verifiers_task    tasks of the library verifiers
verifiers_replay  episodes of its environments with several turns, replayed for each reply
arithmetic        safe evaluation of arithmetic, for calculator and countdown
"""
