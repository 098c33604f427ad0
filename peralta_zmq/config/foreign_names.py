"""Errors for unknown settings with the right name: misspelt, or the name in another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeAlias, cast

from peralta_zmq.errors import ConfigError

Known: TypeAlias = Mapping[str, Mapping[str, object]]  # section -> leaf -> type

# Section names of other programs.
FOREIGN_SECTIONS = {
    "adv": "advantage",
    "broadcast": "weights",
    "buffer": "curriculum",
    "ckpt": "checkpoint",
    "dataset": "data",
    "env": "task",
    "evaluation": "eval",
    "filters": "filter",
    "generation": "sampling",
    "inference": "engine",
    "logging": "log",
    "network": "wire",
    "optim": "train",
    "peft": "lora",
    "optimizer": "train",
    "rollout": "sampling",
    "sampler": "sampling",
    "scheduler": "train",
    "trainer": "train",
    "training": "train",
    "transport": "wire",
    "weight_broadcast": "weights",
    "zmq": "wire",
}

# Names in TRL, prime-rl, Surogate, AReaL, PipelineRL and the original, by our setting.
FOREIGN = {
    "advantage.eps": "advantage.epsilon adv_eps advantage_eps",
    "advantage.name": "advantage_type advantage_estimator adv_estimator scale_rewards",
    "checkpoint.interval": "ckpt_interval save_every save_interval save_steps save_freq",
    "checkpoint.keep_last": "checkpoint.keep keep_checkpoints save_total_limit",
    "data.answer_column": "answer_field answer_key label_column target_column",
    "data.eval": "eval_data eval_dataset eval_dataset_name eval_file eval_path test_file",
    "data.prompt_column": "prompt_field prompt_key question_column",
    "data.system_prompt": "system system_message",
    "data.train": "dataset_name dataset_path train_data train_dataset train_file train_path",
    "engine.max_model_len": "context_length max_context max_seq_len model_max_length",
    "engine.slots": "max_num_seqs num_slots prompt_batch_size prompts_per_batch prompts_per_step",
    "curriculum.online_difficulty_filtering": "dynamic_sampling filter_groups",
    "eval.interval": "eval_every eval_freq eval_interval eval_steps test_freq",
    "eval.rollouts_per_example": "eval_num_samples n_eval_rollouts",
    "eval.num_examples": "eval_examples num_eval_examples num_eval_samples",
    "eval.eval_base_model": "eval_base eval_before_train eval_on_start val_before_train",
    "generator.count": "num_shards world_size",
    "generator.index": "generator_id generator_rank rank shard worker_id",
    "generator.name": "generator_name worker_name",
    "generator.num_workers": "generator.workers generator.threads generator.num_threads",
    "log.level": "log_level loglevel verbosity",
    "loss.behav_imp_weight_cap": "behave_imp_weight_cap behavior_imp_weight_cap is_cap",
    "loss.beta": "kl_beta kl_coef kl_coeff kl_loss_coef",
    "loss.c_clip": "clip_ratio_c dual_clip eps_clip_c",
    "loss.entropy_coef": "ent_coef entropy_bonus entropy_coeff entropy_coefficient",
    "loss.epsilon": "loss.eps clip_eps clip_range clip_ratio clip_ratio_low cliprange "
    "epsilon_low eps_clip eps_low",
    "loss.epsilon_high": "clip_eps_high clip_higher clip_ratio_high eps_high",
    "loss.name": "algo algorithm loss_fn loss_type",
    "lora.alpha": "lora.lora_alpha lora_alpha",
    "lora.dropout": "lora.lora_dropout lora_dropout",
    "lora.rank": "lora.r lora.lora_r lora_r lora_rank r use_peft",
    "lora.target_modules": "lora.lora_target_modules lora_target_modules target_modules",
    "model.dtype": "precision torch_dtype",
    "model.teacher": "teacher teacher_model teacher_model_name teacher_model_name_or_path",
    "model.name": "base_model model_id model_name model_name_or_path model_path",
    "run.dir": "output_dir outputs_dir run_dir",
    "run.num_local_generators": "local_generators num_generators num_local_workers",
    "run.name": "exp_name experiment experiment_name run_name",
    "sampling.max_completion_length": "completion_length max_completion_len max_gen_len "
    "max_length max_new_tokens max_output_tokens max_response_length max_tokens seq_len",
    "sampling.num_generations": "g_size group_size k n n_samples n_samples_per_prompt "
    "num_completions num_return_sequences num_rollouts num_samples "
    "rollouts_per_prompt rollouts_per_problem samples_per_prompt",
    "sampling.min_p": "minp",
    "sampling.min_tokens": "min_completion_length min_length min_new_tokens",
    "sampling.repetition_penalty": "rep_penalty repeat_penalty",
    "sampling.stop": "stop_strings stop_words stop_sequences",
    "sampling.temp_end": "end_temperature final_temperature temperature_end",
    "sampling.temp_scheduler": "temp_schedule temperature_schedule temperature_scheduler",
    "sampling.temp_start": "initial_temperature start_temperature temperature_start",
    "sampling.temperature": "temp",
    "sampling.top_k": "topk",
    "sampling.top_p": "nucleus topp",
    "task.reward_timeout": "reward_deadline reward_timeout_seconds verify_timeout",
    "task.name": "env_name environment task_name",
    "train.adam_beta1": "beta1 betas betas1",
    "train.adam_beta2": "beta2 betas2",
    "train.batch_size": "batch generation_batch_size global_batch_size "
    "per_device_train_batch_size rollouts_per_step train_batch_size",
    "train.keep_zero_std": "filter_zero_advantage keep_zero_advantage skip_zero_std",
    "train.learning_rate": "lr",
    "train.lr_scheduler_type": "lr_decay_style lr_schedule lr_scheduler schedule scheduler",
    "train.max_async_level": "async_level async_steps max_head_offpolicyness steps_ahead",
    "train.max_grad_norm": "clip_grad grad_clip grad_norm_clip gradient_clip gradient_clipping "
    "max_grad max_norm",
    "train.max_off_policy_steps": "max_lag max_off_policy max_staleness staleness",
    "train.max_steps": "max_train_steps n_steps num_steps num_train_steps num_training_steps "
    "steps total_steps train_steps",
    "train.max_tokens_per_microbatch": "max_tokens_per_batch max_tokens_per_mb "
    "micro_batch_tokens token_budget",
    "train.num_workers": "workers threads num_threads",
    "train.optim": "optim_name optim_type optimizer optimizer_name optimizer_type",
    "train.ref_mixup_alpha": "ref_model_mixup_alpha",
    "train.ref_sync_steps": "ref_model_sync_steps ref_update_interval sync_ref_model",
    "train.token_batch_size": "batch_tokens tokens_per_batch tokens_per_step",
    "train.warmup_steps": "lr_warmup_steps num_warmup_steps warmup",
    "train.weight_decay": "wd",
    "weights.dir": "broadcast_dir weight_dir weights_dir weights_path",
    "weights.keep_last": "keep keep_weights",
    "weights.poll_seconds": "poll poll_interval polling_interval",
    "weights.update": "inflight_updates update_mode weight_update",
    "wire.bind": "bind_address listen listen_address",
    "wire.host": "address hostname ip master_addr trainer_address trainer_host",
    "wire.hwm": "high_water_mark queue_size sndhwm rcvhwm",
    "wire.port": "master_port trainer_port zmq_port",
}
RIGHT_NAMES = {foreign: right for right, names in FOREIGN.items() for foreign in names.split()}


def refuse_unknown_settings(settings: Mapping[str, object], known: Known) -> None:
    """Raise ConfigError for the first unknown section or setting."""
    for section, content in settings.items():
        if section == "env" and isinstance(content, (list, tuple)):
            continue  # [[env]] is ours; [env] is another program's name for [task]
        if section not in known:
            raise ConfigError(_unknown_section(section, content, known))
        if isinstance(content, Mapping):
            _refuse_unknown_leaves(section, cast("Mapping[str, object]", content), known)
        elif not hasattr(content, "model_fields_set"):  # not a Section made in Python
            raise ConfigError(
                f"'{section}' is a section, not a setting ({section} = {shorten(content)}); "
                f"its settings: {', '.join(known[section])}"
            )


def refuse_unknown_rows(
    settings: Mapping[str, object], known: Known, *, leaves: Sequence[str]
) -> None:
    """Raise ConfigError for the first setting in [[env]] or [[eval.env]] not in `leaves`."""
    evaluation = settings.get("eval")
    tables = {"env": settings.get("env")}
    if isinstance(evaluation, Mapping):
        tables["eval.env"] = cast("Mapping[str, object]", evaluation).get("env")
    for option, rows in tables.items():
        for row in cast("list[object]", rows) if isinstance(rows, list) else []:
            for leaf in cast("Mapping[str, object]", row) if isinstance(row, Mapping) else ():
                if leaf not in leaves:
                    near = get_close_matches(leaf, leaves, n=1)
                    hint = f"did you mean {near[0]}?" if near else right_name("", leaf, known)
                    raise ConfigError(f"unknown setting {leaf} in [[{option}]]; {hint}")


def _refuse_unknown_leaves(section: str, content: Mapping[str, object], known: Known) -> None:
    for leaf, value in content.items():
        if leaf not in known[section]:
            hint = right_name(section, leaf, known)
            raise ConfigError(f"unknown setting {section}.{leaf} = {shorten(value)}; {hint}")
        if isinstance(value, bool) and known[section][leaf] is not bool:
            raise ConfigError(  # pydantic would read true as the number 1
                f"{section}.{leaf} = {shorten(value)} is not a number or text; "
                "set a value, or leave it out for the default"
            )


def _unknown_section(section: str, content: object, known: Known) -> str:
    if not isinstance(content, Mapping):
        hint = right_name("", section, known)
        return f"unknown setting {section} = {shorten(content)}; {hint}"
    for leaf, value in cast("Mapping[str, object]", content).items():
        hint = right_name(section, leaf, known)
        return f"unknown setting {section}.{leaf} = {shorten(value)}; {hint}"
    return f"unknown section [{section}]; the sections are {', '.join(known)}"


def right_name(section: str, leaf: str, known: Known) -> str:
    """Return half a sentence that leads from an unknown name to the right one."""
    if section not in known:
        near = get_close_matches(section, known, n=1)
        section = FOREIGN_SECTIONS.get(section) or (near[0] if near else "")
    if leaf in known.get(section, {}):
        return f"did you mean {section}.{leaf}?"
    foreign = leaf.lower().replace("-", "_")
    if right := RIGHT_NAMES.get(f"{section}.{foreign}"):
        return _renamed(leaf, right)
    if homes := [f"[{name}]" for name, leaves in known.items() if leaf in leaves]:
        return f"'{leaf}' is a setting of {' and '.join(homes)} here"
    if right := RIGHT_NAMES.get(foreign):
        return _renamed(leaf, right)
    return _nearest(section, leaf, known)


def _renamed(leaf: str, right: str) -> str:
    section, _, name = right.partition(".")
    return f"'{leaf}' is called '{name}' here, in [{section}]: write {right}"


def _nearest(section: str, leaf: str, known: Known) -> str:
    sections_by_leaf = {name: section for section, leaves in known.items() for name in leaves}
    if near := get_close_matches(leaf, known.get(section, ()), n=1):
        return f"did you mean {section}.{near[0]}?"
    if near := get_close_matches(leaf, sections_by_leaf, n=1):
        return f"did you mean {sections_by_leaf[near[0]]}.{near[0]}?"
    if section:
        return f"the settings of [{section}] are {', '.join(known[section])}"
    return f"the sections are {', '.join(known)}"


def shorten(value: object) -> str:
    """Return the repr of a value, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
