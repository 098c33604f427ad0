"""What a new run will do, in a few lines on the terminal before the first step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from peralta_zmq.config import Config
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.environments import rows_task
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import CUT_OFF, Answer
from peralta_zmq.trainer.evaluation import Answering
from peralta_zmq.trainer.session import StopSignal
from peralta_zmq.trainer.trained_model import TrainedModel


def start_lines(
    config: Config,
    reasons: Mapping[str, str],
    policy: TrainedModel,
    train: Environments,
    held_out: Environments,
    stop: StopSignal,
) -> list[str]:
    """At most seven lines; `reasons` are those of the settings that the program chose."""

    def shown(name: str, text: str) -> str:
        return f"{text} ({reasons[name]})" if name in reasons else text

    info = policy.worker_info
    settings = config.train
    lora = config.lora
    method = f"LoRA of rank {lora.rank}" if lora.rank is not None else "full fine-tuning"
    length = config.max_completion_length
    rate = shown("train.learning_rate", f"rate {settings.learning_rate:g}")
    batch = shown("train.batch_size", f"{settings.batch_size} rollouts")
    context = shown("engine.max_model_len", f"context {config.engine.max_model_len}")
    tokens = f"micro-batches of {settings.max_tokens_per_microbatch} tokens"
    micro_batch = shown("train.max_tokens_per_microbatch", tokens)
    completion = shown("sampling.max_completion_length", f"completions of up to {length} tokens")
    every = shown("eval.interval", f"every {config.eval.interval} steps")
    if config.eval.interval >= settings.max_steps:
        every = "before and after"
    lines = {
        "model": f"{Path(config.model.name).name}, {policy.model.num_parameters() / 1e6:.1f} M "
        f"parameters; {method} in {info['dtype']} on {info['device']}",
        "task": "; ".join(_task_text(env, train) for env in config.environments),
        "data": f"{len(train.problems)} prompts to train on, {len(held_out.problems)} held out, "
        f"evaluated {every}",
        "learning": f"{rate}, {settings.lr_scheduler_type}; {settings.max_steps} steps of {batch}",
        "lengths": f"{completion}; {context}; {micro_batch}",
        "example": _example_text(config, policy, held_out, stop),
    }
    return [f"{name:<9} {text}" for name, text in lines.items() if text]


def _task_text(env: EnvSection, train: Environments) -> str:
    reward = ", ".join(env.reward)
    if env.address is not None:
        reward = "of the verifier"
    elif not reward and env.task_name == "rows":
        problems = [problem for problem in train.problems if problem.task == env.label]
        reward = f"answer_match ({rows_task.answer_forms(problems)})"
    return f"{env.label}, reward {reward or 'of the task'}"


def _example_text(
    config: Config, policy: TrainedModel, held_out: Environments, stop: StopSignal
) -> str:
    problem = held_out.problems[0]
    try:
        answer = _first_answer(config, policy, held_out, stop)
    except TaskError as error:
        return f"an answer of the model gets no reward: {error}"
    if answer is None:
        return ""
    text = f"{_short(problem.question)} -> {_short(answer.answer)}{CUT_OFF * answer.cut_off}"
    is_known = problem.answer and problem.answer != problem.id  # a verifier keeps the answers
    expected = f"; the answer is {_short(problem.answer)}" if is_known else ""
    return f"{text} earns {answer.reward:g}{expected}"


def _first_answer(
    config: Config, policy: TrainedModel, held_out: Environments, stop: StopSignal
) -> Answer | None:
    """An answer to the first problem, before training; None after 20 seconds or a stop."""
    deadline = time.monotonic() + 20.0
    engine = policy.open_engine()
    with closing(Answering(config, engine, policy.tokenizer, held_out)) as answering:
        answering.start(held_out.problems[0])
        while answering.is_busy and not stop.requested and time.monotonic() < deadline:
            for _, answers in answering.advance():
                return answers[0]
        answering.check()
    return None


def _short(text: str) -> str:
    """The end of a text on one line, in quotation marks: instructions come first."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"...{line[-60:]}")
