"""Reference model and teacher from the config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_data import group_of, token_logprobs
from user_modules import UserModules

from peralta_zmq import build, models
from peralta_zmq.build import components
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError

PULLED = ("--loss.name=ref_kl", "--loss.kl-tau=0")


def config_of(*arguments: str) -> Config:
    return load_config("bin/trainer", ["--train.batch-size=8", "--train.dtype=float32",
                                       "--train.learning-rate=0.001", *arguments])  # fmt: skip


def embedded() -> Any:
    return models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The embedded model with other weights and the same tokenizer."""
    folder = tmp_path / "teacher"
    shutil.copytree(models.EMBEDDED, folder)
    model = embedded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(folder)
    return folder


def group() -> Any:
    return group_of([1, 0, 0, 1], lengths=[6, 5, 7, 4])


def logprob_distance(model: Any, other: Any) -> float:
    """Mean absolute difference of the logprobs of the generated tokens."""
    differences = []
    for rollout in group().rollouts:
        ids = torch.from_numpy(rollout.token_ids).long()[None]
        with torch.no_grad():
            policy, teacher = (token_logprobs(scored, ids)[0] for scored in (model, other))
        differences.append((teacher - policy)[torch.from_numpy(rollout.loss_mask)])
    return float(torch.cat(differences).abs().mean())


def test_teacher_loss_moves_policy_towards_teacher(teacher: Path) -> None:
    config = config_of(*PULLED, "--model.teacher", str(teacher))
    model = embedded()
    other = models.load_model(teacher, device=torch.device("cpu"), dtype=torch.float32)
    learner = build.make_learner(config, model)
    before = logprob_distance(model, other)
    for _ in range(6):
        learner.learn([group()])
    assert logprob_distance(model, other) < 0.8 * before


def test_teacher_without_folder_is_the_base_model() -> None:
    # without rewards: at the base nothing pulls; away from it the base does
    model, base = embedded(), embedded()
    learner = build.make_learner(config_of(*PULLED), model)
    assert learner.learn([group()]).metrics["grad_norm"] == 0
    assert all(map(torch.equal, model.parameters(), base.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    before = logprob_distance(model, base)
    for _ in range(6):
        learner.learn([group()])
    assert logprob_distance(model, base) < 0.8 * before


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build.make_learner(config_of(*arguments), embedded())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_teacher_with_other_vocabulary_is_refused(teacher: Path) -> None:
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    five, six = vocabulary["5"], vocabulary["6"]
    vocabulary["5"], vocabulary["6"] = six, five
    file.write_text(json.dumps(tokenizer), "utf-8")
    message = refused(*PULLED, "--model.teacher", str(teacher))
    assert message.startswith(
        f"model.teacher {teacher} has another vocabulary: '5' is token {six} "
    )
    assert f"there and {five} in model.name embedded; choose a teacher with the same" in message


def test_teacher_with_fewer_logits_is_refused(teacher: Path) -> None:
    model = embedded()
    model.resize_token_embeddings(model.config.vocab_size - 4)
    model.save_pretrained(teacher)
    message = refused(*PULLED, "--model.teacher", str(teacher))
    assert "464 tokens, but model.name embedded for 468; choose a teacher with" in message


def test_reference_is_updated_every_ref_sync_steps() -> None:
    config = config_of("--loss.name=grpo_kl", "--train.ref-sync-steps=2")
    learner = build.make_learner(config, embedded())
    kl = [learner.learn([group()]).metrics["kl"] for _ in range(4)]
    assert [value == 0 for value in kl] == [True, False, True, False]


def test_kl_term_applies_to_kept_groups_of_equal_rewards() -> None:
    equal = group_of([1, 1, 1, 1], lengths=[6, 5, 7, 4])
    rows = {}
    for keep in ("--no-train.keep-zero-std", "--train.keep-zero-std"):
        model = embedded()
        learner = build.make_learner(config_of("--loss.name=grpo_kl", "--loss.beta=1", keep), model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        rows[keep] = learner.learn([equal]).metrics
    left_out, kept = rows.values()
    assert left_out["grad_norm"] == 0
    assert kept["grad_norm"] > 0 and kept["kl"] > 0
    assert left_out["frac_reward_zero_std"] == kept["frac_reward_zero_std"] == 1
    assert kept["loss"] == pytest.approx(kept["kl"], rel=0.5)  # no advantage, only the distance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.teacher=embedded"],
         "model.teacher embedded is set, but loss 'reinforce' uses no teacher; remove it or set "
         "loss.teacher_tau above 0"),
        ([*PULLED, "--model.teacher=no/model"], "model 'no/model' is neither a folder nor in the"),
        (["--train.ref-sync-steps=2"],
         "train.ref_sync_steps 2 is set, but loss 'reinforce' uses no reference model; remove"),
        (["--loss.name=grpo_kl", "--loss.beta=0", "--train.ref-sync-steps=2"],
         "train.ref_sync_steps 2 is set, but loss 'grpo_kl' uses no reference model; remove it"),
    ],
)  # fmt: skip
def test_settings_without_effect_or_model_are_refused(arguments: list[str], message: str) -> None:
    assert refused(*arguments).startswith(message)


OWN = """
def held(tokens, *, beta: float = 0.5, teacher_tau: float = 0.0):
    pull = beta * (tokens.logprobs - tokens.ref_logprobs) ** 2
    return (pull * tokens.mask).sum() / tokens.step_tokens, {}
"""


def test_user_loss_gets_models_by_its_option_names(
    teacher: Path, user_modules: UserModules
) -> None:
    user_modules.write("held_back", OWN)
    own = "--loss.name=held_back.held"
    assert components.reference_models_used(config_of(own)) == {"reference"}
    assert components.reference_models_used(config_of(own, "--loss.beta=0")) == set()
    taught = config_of(own, "--loss.kwargs", '{"teacher_tau": 1}')
    assert components.reference_models_used(taught) == {"reference", "teacher"}
    learned = build.make_learner(config_of(own), embedded()).learn([group()]).metrics
    assert learned["loss"] == 0  # the reference is the policy itself
