"""Loss, advantage and filters from the config; refused options and failing user functions."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_data import group_of, tiny_model
from user_modules import UserModules

from peralta_zmq import build, models, registry
from peralta_zmq.build import components
from peralta_zmq.build.environments import make_demonstrations
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import ConfigError, TaskError, UserCodeError
from peralta_zmq.learning.losses import Tokens
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.rollout import Message, Rollout

MINE = """
import math

def loss(tokens, *, power=1.0):
    value = -(tokens.advantages * tokens.logprobs * tokens.mask).sum() / tokens.step_tokens
    return value * power, {}
def nan_loss(tokens): return tokens.logprobs.sum() * math.nan, {}
def raising(*arguments): return {}["missing"]
def steep(tokens): return (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt().sum(), {}
def shy(tokens, *, limit): return tokens.logprobs.sum(), {}
def greedy(tokens, **options): return tokens.logprobs.sum() * options["epsilon"], {}
def best(rewards, lengths, *, scale=1.0): return [scale * (r - max(rewards)) for r in rewards]
def short(rewards, lengths): return [0.0]
def loud(rollout, *, limit, vocab_size): return rollout.num_generated > limit and vocab_size == 64
def maybe(rollout): return 0.3
"""


@pytest.fixture(autouse=True)
def mine(user_modules: UserModules) -> None:
    user_modules.write("mine", MINE)


def config_of(*arguments: str) -> Config:
    return load_config("bin/trainer", ["--train.batch-size=8", *arguments])


def tokens_of(pi: float = -1.0) -> Tokens:
    return Tokens(
        logprobs=torch.full((4,), pi, requires_grad=True),
        old_logprobs=torch.full((4,), -1.2),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        mask=torch.ones(4),
        sequence=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        step_tokens=4.0,
        step_sequences=2.0,
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )


def error_of(function: Callable[[Config], Any], *arguments: str) -> str:
    with pytest.raises((ConfigError, UserCodeError)) as caught:
        function(config_of(*arguments))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def filters(config: Config) -> list[Any]:
    return components.make_filters(config, vocab_size=64)


# Options.


PLUGINS = [(kind, name) for kind in ("loss", "advantage") for name in registry.TABLES[kind]]


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_shipped_function_trains_with_defaults(kind: str, name: str) -> None:
    model = tiny_model()
    before = model.lm_head.weight.detach().clone()
    config = config_of(f"--{kind}.name", name, "--train.dtype=float32")
    group = group_of([1, 0, 0, 1], lengths=[4, 2, 6, 3])
    near = tuple(  # m2po leaves out tokens with a squared log ratio of 1
        dataclasses.replace(each, logprobs=each.loss_mask * np.float32(-math.log(64)))
        for each in group.rollouts
    )
    group = dataclasses.replace(group, rollouts=near)
    row = build.make_learner(config, model).learn([group]).metrics
    assert row["skipped"] == 0 and row["grad_norm"] > 0
    assert not torch.equal(model.lm_head.weight, before)


def test_options_are_bound() -> None:
    # r = e^.2 = 1.2214; clipped at 1.05 for A > 0, kept for A < 0
    loss = components.make_loss(config_of("--loss.name=dapo", "--loss.epsilon=0.05"))
    assert loss(tokens_of())[0].item() == pytest.approx((-2 * 1.05 + 2 * 1.221403) / 4, abs=1e-6)
    advantage = components.make_advantage(
        config_of("--advantage.name=group_zscore", "--advantage.scale-rewards=none")
    )
    assert advantage([1, 0], [1, 1]) == [0.5, -0.5]


@pytest.mark.parametrize(
    "arguments",
    [["--advantage.name=group_zscore"], ["--advantage.name=leave_one_out"]],
)
@pytest.mark.parametrize("rewards", [[2, 2], [0.1, 0.1, 0.1], [3]])
def test_step_on_equal_rewards_or_one_rollout_changes_nothing(
    arguments: list[str], rewards: list[float]
) -> None:
    model = tiny_model()
    learner = build.make_learner(config_of("--train.keep-zero-std", *arguments), model)
    before = model.lm_head.weight.detach().clone()
    result = learner.learn([group_of(rewards)])
    assert result.advantages == [[0.0] * len(rewards)]
    assert torch.equal(model.lm_head.weight, before)


def test_constant_aggregation_divides_by_max_completion_length() -> None:
    # 2 rollouts of 2 tokens: r = e^.2, clipped at 1.2 for A = 1, kept for A = -1
    config = config_of("--loss.name=dr_grpo", "--sampling.max-completion-length=5")
    loss = components.make_loss(config)(tokens_of())[0]
    assert loss.item() == pytest.approx((-2 * 1.2 + 2 * 1.221403) / (2 * 5), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        (["--loss.name=dapo"], set()),
        (["--loss.name=dapo", "--loss.beta=0.1"], {"reference"}),
        (["--loss.name=ref_kl"], {"teacher"}),
        (["--loss.name=grpo_kl", "--loss.teacher-tau=1"], {"reference", "teacher"}),
    ],
)
def test_loss_names_the_models_that_it_needs(arguments: list[str], models: set[str]) -> None:
    assert components.reference_models_used(config_of(*arguments)) == models


def test_masks_over_the_step_are_those_of_the_config() -> None:
    arguments = ["--loss.name=m2po", "--loss.top-entropy-quantile=0.5", "--train.dtype=float32"]
    # 16 tokens with different entropies; all squared log ratios are about 1, above 0.04
    learner = build.make_learner(config_of(*arguments), tiny_model())
    row = learner.learn([group_of([1, 0, 0, 1])]).metrics
    assert (row["masked/entropy"], row["masked/m2"], row["masked/mean"]) == (0.5, 1, 1)


def one_demonstration(folder: Path, *arguments: str) -> Rollout:
    file = folder / "demos.jsonl"
    file.write_text('{"prompt": "What is 2 + 3?", "completion": "2 + 3"}\n')
    model = tiny_model(vocab_size=468)
    config = config_of(f"--loss.sft-file={file}", *arguments)
    demonstrations = make_demonstrations(config, model, Scorer(model))
    assert demonstrations is not None
    return demonstrations.rollouts[0]


@pytest.mark.parametrize(("end_of_turn", "end"), [("<|im_end|>", 2), ("", 0)])  # tokenizer: 0
def test_demonstration_ends_as_the_chat_template_ends_a_turn(
    tmp_path: Path, end_of_turn: str, end: int
) -> None:
    folder = shutil.copytree(models.EMBEDDED, tmp_path / "model")
    tokenizer = models.load_tokenizer(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", end_of_turn)
    tokenizer.save_pretrained(folder)
    rollout = one_demonstration(tmp_path, f"--model.name={folder}")
    assert rollout.token_ids[-1] == end
    assert tokenizer.decode(rollout.token_ids[rollout.loss_mask][:-1].tolist()) == "2 + 3"


def test_prompt_of_a_demonstration_has_the_schemas_of_tools(tmp_path: Path) -> None:
    arguments = ("--task.name=calculator_tool", "--model.name=embedded_turns")
    rollout = one_demonstration(tmp_path, *arguments)
    with closing(build.open_environments(config_of(*arguments), "train", limit=1)) as environments:
        variables = environments.problems[0].chat_template_kwargs
    tokenizer = models.load_tokenizer(models.EMBEDDED_TURNS)
    prompt = models.chat_prompt(tokenizer, [Message("user", "What is 2 + 3?")], **variables)
    assert rollout.token_ids[~rollout.loss_mask].tolist() == prompt
    assert "calculate" in tokenizer.decode(prompt)


LATE_TOOLS = """
tool_schemas = []
def reply(problem, messages, *, tool_seconds): ...
def reward(problem, text): return 0.0
def problems(split, seed):
    tool_schemas[:] = [{"type": "function", "function": {"name": "late"}}]
    from peralta_zmq.environments.calculator_tool import problems
    return problems(split, seed)
"""


def test_demonstrations_have_schemas_that_are_known_after_loading(
    tmp_path: Path, user_modules: UserModules
) -> None:
    user_modules.write("late.tools", LATE_TOOLS)
    of_turns = ("--model.name", "embedded_turns")
    tokenizer = models.load_tokenizer(models.EMBEDDED_TURNS)
    rollout = one_demonstration(tmp_path, "--task.name=late.tools", *of_turns)
    assert '"late"' in tokenizer.decode(rollout.token_ids)
    served = config_of("--task.name=calculator_tool", *of_turns)
    with closing(Verifier(served, host="127.0.0.1", port=0, token=None)) as verifier:
        address = f'address = "http://127.0.0.1:{verifier.port}"'
        (tmp_path / "env.toml").write_text(f'[[env]]\ntask = "calculator_tool"\n{address}\n')
        rollout = one_demonstration(tmp_path, *of_turns, "@", str(tmp_path / "env.toml"))
    assert "calculate" in tokenizer.decode(rollout.token_ids)


def test_demonstrations_longer_than_a_micro_batch_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for limit in (10, 100):
        one_demonstration(tmp_path, f"--train.max-tokens-per-microbatch={limit}")
    assert caplog.messages == [
        "1 of 1 demonstrations in loss.sft_file are longer than "
        "train.max_tokens_per_microbatch 10: their beginning is trained"
    ]


def test_demonstration_with_a_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "demos.jsonl"
    file.write_text('{"prompt": "2", "completion": "2"}\n')
    with pytest.raises(TaskError, match=r"row 1 of loss\.sft_file has token \d+, but"):
        build.make_learner(config_of(f"--loss.sft-file={file}"), tiny_model(vocab_size=8))


REFUSED_OPTIONS = [
    ("--loss.delta=3",
     "loss.delta is not an option of loss 'reinforce'; remove it or set loss.name to grpo or "
     "dapo or bnpo or dr_grpo or luspo or gspo or decoupled_ppo"),
    ("--loss.importance-sampling-clip-max=2",
     "loss.importance_sampling_clip_max has no effect without loss.importance_sampling_mode"),
    ("--loss.name=cispo --loss.epsilon-high=None", "loss cispo needs loss.epsilon_high"),
    ("--loss.name=vespo --loss.importance-sampling-level=sequence_mean",
     "loss vespo computes the ratio of a whole rollout itself"),
    ("--advantage.scale-rewards=batch",
     "advantage.scale_rewards is not an option of advantage 'group_mean'; remove it or set "
     "advantage.name to group_zscore or leave_one_out"),
    ("--loss.name=ref_kl --loss.kl-tau=0 --loss.teacher-tau=0",
     "loss ref_kl uses no rewards, and loss.teacher_tau, loss.kl_tau, loss.beta and"),
]  # fmt: skip


def make_objective(config: Config) -> None:
    components.make_loss(config)
    components.make_advantage(config)


@pytest.mark.parametrize(("arguments", "message"), REFUSED_OPTIONS)
def test_unknown_or_ineffective_options_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_objective(config_of(*arguments.split()))
    assert str(caught.value).startswith(message)
    make_objective(config_of(*arguments.split()[:-1]))  # valid without the last option


def test_entropy_bonus_is_the_mean_over_tokens() -> None:
    plain = components.make_loss(config_of())(tokens_of())[0].item()
    loss = components.make_loss(config_of("--loss.entropy-coef=0.1"))
    value, metrics = loss(tokens_of())
    assert value.item() == pytest.approx(plain - 0.1 * 2.5)
    assert metrics["entropy"].item() == 2.5


def test_normalized_terms_reach_the_advantages_with_their_weights(tmp_path: Path) -> None:
    # terms 1 0 0 1 and 0 0 1 1: mean 1/2, sample deviation .57735; weights 1 and 2
    config = config_of(
        "--advantage.multi-objective-aggregation=normalize_then_sum",
        "--task.reward=task,soft_overlong", "--task.reward-weights=1,2",
    )  # fmt: skip
    group = group_of([1, 0, 1, 2])
    terms = [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
    rollouts = tuple(
        dataclasses.replace(each, rewards={"task": first, "soft_overlong": second})
        for each, (first, second) in zip(group.rollouts, terms, strict=True)
    )
    group = dataclasses.replace(group, rollouts=rollouts, task="calculator")
    one = 0.5 / 0.57745
    result = build.make_learner(config, tiny_model()).learn([group])
    assert result.advantages == [pytest.approx([-one, -3 * one, one, 3 * one], abs=1e-4)]


# Filters.


def test_filters_get_options_and_values_of_the_run() -> None:
    config = config_of(
        "--filter.count=gibberish,repetition", "--filter.remove=overlong",
        "--sampling.max-completion-length=20",
        "--filter.kwargs", '{"repetition": {"window": 4}}',
    )  # fmt: skip
    by_name = {entry.name: entry for entry in filters(config)}
    assert {name: entry.enforce for name, entry in by_name.items()} == {
        "gibberish": False, "repetition": False, "overlong": True,
    }  # fmt: skip
    assert by_name["repetition"].detects.keywords == {  # type: ignore[attr-defined]
        "window": 4, "max_completion_length": 20,
    }  # fmt: skip
    assert by_name["gibberish"].detects.keywords["vocab_size"] == 64  # type: ignore[attr-defined]


def test_options_of_a_filter_that_is_not_used_are_refused() -> None:
    message = error_of(filters, "--filter.count=overlong", "--filter.kwargs", '{"mine.loud": {}}')
    assert message.startswith("filter.kwargs has options of mine.loud, which is not in filter.cou")


def learned(*arguments: str) -> tuple[dict[str, float], torch.Tensor]:
    model = tiny_model()
    config = config_of("--train.dtype=float32", *arguments)
    group = group_of([1, 0, 0], lengths=[4, 2, 6])
    return build.make_learner(config, model).learn([group]).metrics, model.lm_head.weight


OWN = ("--filter.kwargs", '{"mine.loud": {"limit": 5}}')


def test_enforced_filter_removes_rollouts_but_keeps_the_baseline() -> None:
    # reinforce over the rest: advantages 1/3 stay: -(2/3 * pi of 4 - 1/3 * pi of 2) / 6
    counted, unfiltered = learned("--filter.count=mine.loud", *OWN)
    enforced, filtered = learned("--filter.remove=mine.loud", *OWN)
    assert (counted["filter/mine.loud"], counted["filter/taken_out"]) == (1 / 3, 0)
    assert (enforced["filter/mine.loud"], enforced["filter/taken_out"]) == (1 / 3, 1 / 3)
    assert enforced["reward"] == counted["reward"] == pytest.approx(1 / 3)
    assert counted["loss"] != enforced["loss"]
    assert not torch.equal(unfiltered, filtered)
    # a uniform guess among 64 gives -ln 64 to each token, nearly
    expected = -(2 / 3 * 4 - 1 / 3 * 2) / 6 * -4.158883
    assert enforced["loss"] == pytest.approx(expected, abs=0.05)


# User functions.


def test_user_functions_get_their_kwargs() -> None:
    config = config_of("--loss.name=mine.loss", "--loss.kwargs", '{"power": 2.0}')
    tokens = dataclasses.replace(tokens_of(), mask=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    doubled = components.make_loss(config)(tokens)[0]
    plain = components.make_loss(config_of("--loss.name=mine.loss"))(tokens)[0]
    assert doubled.item() == 2 * plain.item() != 0
    arguments = ["--advantage.name=mine.best", "--advantage.kwargs", '{"scale": 3.0}']
    assert components.make_advantage(config_of(*arguments))([1, 0], [2, 2]) == [0, -3]


def test_user_loss_with_var_keywords_gets_section_options() -> None:
    loss = components.make_loss(config_of("--loss.name=mine.greedy", "--loss.epsilon=0.5"))
    assert loss(tokens_of())[0].item() == -2.0


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (components.make_loss, ["--loss.name=mine.shy"],
         "loss 'mine.shy': missing a required argument: 'limit'; its options are limit, set them"),
        (components.make_loss, ["--loss.name=mine.loss", "--loss.kwargs", '{"force": 2}'],
         "loss 'mine.loss': got an unexpected keyword argument 'force'; its options are power"),
        (str, ["--loss.name=gspo", "--loss.kwargs", '{"epsilon": 2}'],
         "loss.kwargs is only for a loss of your own; set the options of 'gspo' in [loss]"),
        (components.make_advantage, ["--advantage.name=mine.best",
        "--advantage.kwargs", '{"s": 1}'],
         "advantage 'mine.best': got an unexpected keyword argument 's'; its options are scale"),
        (filters, ["--filter.count=mine.loud"],
         "filter 'mine.loud': missing a required argument: 'limit'; its options are limit, "),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_a_user_function_are_refused(
    build: Any, arguments: list[str], message: str
) -> None:
    assert error_of(build, *arguments).startswith(message)


@pytest.mark.parametrize(("name", "bonus"), [("steep", "0"), ("steep", "0.1"), ("nan_loss", "0")])
def test_user_loss_that_is_not_finite_is_named_and_changes_no_weights(
    name: str, bonus: str
) -> None:
    model = tiny_model()
    config = config_of(f"--loss.name=mine.{name}", "--loss.entropy-coef", bonus)
    learner = build.make_learner(config, model)
    before = model.lm_head.weight.detach().clone()
    result = learner.learn([group_of([1, 0])])
    assert result.skip_reason == f"loss '{name}' or its gradient is not finite"
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss.name=mine.raising"],
         r"loss 'mine\.raising' raised KeyError: 'missing' \(.*mine\.py, line 8\)"),
        (["--advantage.name=mine.short"],
         r"advantage 'mine\.short' returned 1 advantages for 2 rewards"),
        (["--filter.count=mine.maybe"],
         r"filter 'mine\.maybe' returned 0\.3; return True or False"),
    ],
)  # fmt: skip
def test_failing_user_function_is_named_and_changes_no_weights(
    arguments: list[str], message: str
) -> None:
    model = tiny_model()
    learner = build.make_learner(config_of(*arguments), model)
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(UserCodeError, match=message):
        learner.learn([group_of([1, 0])])
    assert torch.equal(model.lm_head.weight, before)
