"""Episodes of several turns: exact tokens and logprobs, limits, failures, changes of weights."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from engine_data import (
    Opener,
    TokenCounter,
    assert_exact_logprobs,
    engine_on,
    trainer_logprobs,
)
from sample_data import tiny_model

from peralta_zmq import models
from peralta_zmq.engines import RequestGroup, Sampler, hf_engine
from peralta_zmq.engines.group_sampler import TURN_STRIDE
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.engines.row_engine import RowEngine
from peralta_zmq.errors import RewardError
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import (
    Completion,
    Message,
    Problem,
    Request,
    Sampling,
    Score,
    rollout_of,
)

# At least 16 tokens, so that they are in the shared part of the cache.
TURNS = Problem("1", "turns", (Message("user", "3 plus 2 plus 2 plus 2 plus 2"),), "5")
ONE_TURN = Problem("2", "one", (Message("user", "4 plus 2"),), "6")
SAMPLING = Sampling(max_completion_length=6, seed=3)
MESSAGE = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
REFUSES_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}" + MESSAGE + "{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for message in messages if message.role == 'system' %}" + MESSAGE + "{% endfor %}"
    "{% for message in messages if message.role != 'system' %}" + MESSAGE + "{% endfor %}"
)


class Game:
    """Replies with the number of completions so far, `num_replies` times; records the messages."""

    def __init__(self, num_replies: int = 2) -> None:
        self.num_replies = num_replies
        self.seen: list[tuple[Message, ...]] = []
        self._threads = ThreadPoolExecutor(1)

    def has_turns(self, problem: Problem) -> bool:
        return problem.task == "turns"

    def has_agent(self, problem: Problem) -> bool:
        return False

    def run_agent(self, problem: Problem, *, base_url: str, api_key: str) -> Future[Score]:
        raise NotImplementedError

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Any]:
        self.seen.append(tuple(messages))
        return self._threads.submit(self.compute, messages)

    def compute(self, messages: Sequence[Message]) -> list[Message] | None:
        count = sum(message.role == "assistant" for message in messages)
        return [Message("user", f"no {count}")] if count <= self.num_replies else None


class Held(Game):
    """Replies when the test sets the result of `future`."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[Any] = Future()

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Any]:
        self.seen.append(tuple(messages))
        return self.future


def model_of(seed: int = 0) -> Any:
    return tiny_model(seed=seed, vocab_size=468, head_dim=32)


def native(tokenizer: Any, model: Any = None, *, length: int = 128) -> RowEngine:
    return native_engine(
        model or model_of(),
        tokenizer,
        EngineSettings(slots=4, max_model_len=length, keeps_turns=True),
    )


def hf(tokenizer: Any) -> RowEngine:
    return hf_engine.open_live(model_of(), tokenizer, EngineSettings(slots=4, max_model_len=128))


class Recorder:
    """An engine that records the completions of all turns, and the indices of its requests."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.turns, self.submitted = engine, list[Completion](), list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted += [request.index for request in requests]
        self._engine.submit(requests)

    def advance(self) -> list[Completion]:
        completions = self._engine.advance()
        self.turns += completions
        return completions


def play(
    engine: Any,
    tokenizer: Any,
    replies: Any,
    problems: Sequence[Problem] = (TURNS, ONE_TURN),
    *,
    sampling: Sampling = SAMPLING,
    max_turns: int = 8,
    between_steps: Callable[[Sampler], None] = lambda sampler: None,
    on_group: Callable[[Problem], None] = lambda problem: None,
) -> dict[str, list[Completion]]:
    """The completions of groups of three, by the id of the problem."""
    groups: dict[str, list[Completion]] = {}
    sampler, waiting = Sampler(engine, tokenizer, max_turns=max_turns), deque(problems)
    while waiting or sampler.num_in_flight:
        while waiting and sampler.has_room:
            sampler.start(waiting.popleft(), 3, sampling, replies=replies)
        for group in sampler.advance():
            groups[group.problem.id] = group.completions
            on_group(group.problem)
        between_steps(sampler)
    return groups


def steps_of(completions: Sequence[Completion]) -> np.ndarray:
    """The policy step of each token after the prompts; -1 for tokens of replies."""
    return np.concatenate([each.policy_steps for each in completions])


def test_every_sampled_token_has_ratio_one_and_inserted_ones_none(
    opener: Opener, tokenizer: Any
) -> None:
    engine = opener(model_of(), max_model_len=128)
    groups = play(engine, tokenizer, Game())
    for completion in groups["1"]:
        rollout = rollout_of(completion, 0.5)
        sampled = completion.policy_steps >= 0
        assert rollout.loss_mask.tolist() == [False] * len(completion.prompt_ids) + sampled.tolist()
        assert (np.diff(sampled.astype(int), prepend=0) == 1).sum() == 3  # turns
        assert (completion.logprobs[~sampled] == 0).all()
    expected = trainer_logprobs(model_of(), groups["1"])
    assert_exact_logprobs(groups["1"], expected, steps_of(groups["1"]) >= 0)
    (one_turn, *_) = groups["2"]
    assert (one_turn.policy_steps == 0).all() and one_turn.messages == ()


def test_sampled_ids_are_kept_and_only_the_reply_is_tokenized(tokenizer: Any) -> None:
    engine, game = Recorder(native(tokenizer)), Game()
    for completion in play(engine, tokenizer, game, [TURNS])["1"]:
        turns = [t for t in engine.turns if t.index % TURN_STRIDE == completion.index]
        ids, messages = completion.prompt_ids.tolist(), list(TURNS.messages)
        for number, turn in enumerate(sorted(turns, key=lambda turn: turn.index), start=1):
            assert turn.prompt_ids.tolist() == ids
            messages.append(Message("assistant", turn.text))
            reply = Message("user", f"no {number}")
            ended = turn.token_ids[-1] == tokenizer.eos_token_id
            inserted = models.continuation_ids(
                tokenizer, messages, [reply], ended=ended, chat_template_kwargs={}
            )
            ids += turn.token_ids.tolist()
            if number < 3:
                ids += inserted
                messages.append(reply)
        assert rollout_of(completion, 0.0).token_ids.tolist() == ids
        assert (*TURNS.messages, *completion.messages) == tuple(messages)
        assert (*TURNS.messages, *completion.messages) in game.seen
        assert completion.text == messages[-1].content


def test_end_token_outside_of_the_special_ones_is_not_doubled(
    opener: Opener, tokenizer: Any
) -> None:
    """As <|end|> of Phi-3 and <|eom_id|> of Llama 3.1."""
    model = model_of()
    model.generation_config.eos_token_id = list(range(3, 468))
    engine = opener(model, max_model_len=128)
    for completion in play(engine, tokenizer, Game(1), [TURNS])["1"]:
        first = int(np.flatnonzero(completion.policy_steps < 0)[0])
        assert int(completion.token_ids[first - 1]) not in tokenizer.all_special_ids
        assert tokenizer.decode(completion.token_ids[first:]).startswith("\n<|im_start|>user")


def test_earlier_turns_are_not_computed_again(tokenizer: Any) -> None:
    def run(max_kept: int) -> tuple[list[list[int]], int]:
        """The tokens of all completions, and the number of tokens that were computed."""
        model, counts = model_of(), list[int]()
        engine = engine_on(model, tokenizer, max_model_len=128, max_kept=max_kept)
        embed = model.model.embed_tokens
        embed.register_forward_pre_hook(lambda module, ids: counts.append(ids[0].numel()))
        groups = play(engine, tokenizer, Game(), [TURNS])
        return [each.token_ids.tolist() for each in groups["1"]], sum(counts)

    kept, num_kept = run(4 * 128)  # all turns, however long their replies take
    computed, num_computed = run(0)
    assert kept == computed
    replies = [
        models.continuation_ids(
            tokenizer, [*TURNS.messages, Message("assistant", "")],
            [Message("user", f"no {number}")], ended=False, chat_template_kwargs={},
        )
        for number in (1, 2)
    ]  # fmt: skip
    prompt = models.chat_prompt(tokenizer, TURNS.messages)
    sampled = sum(map(len, kept)) - 3 * sum(map(len, replies))
    new = len(prompt) + 3 * sum(map(len, replies)) + sampled
    assert new - 3 <= num_kept <= new + 3 * 2 < num_computed  # batches of replies may be padded


def test_weights_that_change_between_turns_compute_the_context_again(
    opener: Opener, tokenizer: Any
) -> None:
    engine, game = opener(model_of(), max_model_len=128), Held()

    def between_steps(sampler: Sampler) -> None:
        if len(game.seen) == 3 and engine.step == 0:
            engine.apply(WeightUpdate(7, models.weights_of(model_of(seed=1))))
            game.future.set_result([Message("user", "no")])
            game.future = Future()
            game.future.set_result(None)

    completions = play(engine, tokenizer, game, [TURNS], between_steps=between_steps)["1"]
    for completion in completions:
        assert sorted({*completion.policy_steps.tolist()}) == [-1, 0, 7]
    for step, seed in ((0, 0), (7, 1)):
        expected = trainer_logprobs(model_of(seed), completions)
        assert_exact_logprobs(completions, expected, steps_of(completions) == step)


def test_other_completions_are_sampled_while_a_reply_is_computed(tokenizer: Any) -> None:
    game, ended = Held(), list[str]()

    def on_group(problem: Problem) -> None:
        ended.append(problem.id)
        if problem is ONE_TURN:
            game.future.set_result(None)

    play(native(tokenizer), tokenizer, game, on_group=on_group)
    assert ended == ["2", "1"]


def test_next_turn_takes_a_slot_before_the_rest_of_a_group(tokenizer: Any) -> None:
    game = Held()
    game.future.set_result([Message("user", "no")])
    one_slot = native_engine(
        model_of(), tokenizer, EngineSettings(slots=1, max_model_len=128, keeps_turns=True)
    )
    engine = Recorder(one_slot)
    play(engine, tokenizer, game, [TURNS], max_turns=2)
    assert engine.submitted == [0, TURN_STRIDE, 1, 1 + TURN_STRIDE, 2, 2 + TURN_STRIDE]


# Limits and failures.


@pytest.mark.parametrize(("max_turns", "length", "turns"), [(3, 128, 3), (99, 64, 2)])
def test_endless_episode_is_ended_by_a_limit(
    max_turns: int, length: int, turns: int, tokenizer: Any
) -> None:
    engine = native(tokenizer, length=length)
    groups = play(engine, tokenizer, Game(num_replies=1000), [TURNS], max_turns=max_turns)
    for completion in groups["1"]:
        assert completion.finish_reason == "length"
        assert len(completion.prompt_ids) + len(completion.token_ids) <= length
        roles = [message.role for message in completion.messages]
        assert roles[-1] == "assistant"  # without the reply that no completion follows
        assert roles.count("assistant") >= turns
        assert max_turns == 99 or roles.count("assistant") == turns


def fail(messages: Sequence[Message]) -> list[Message]:
    raise RewardError("reply failed")


@pytest.mark.parametrize(("compute", "error"), [
    (fail, "reply failed"),
    (lambda messages: [Message("user", "\ud800")], "surrogates not allowed"),
])  # fmt: skip
def test_failed_reply_ends_the_episode_with_an_error(
    compute: Any, error: str, tokenizer: Any
) -> None:
    game = Game()
    game.compute = compute
    for completion in play(native(tokenizer), tokenizer, game)["1"]:
        assert isinstance(completion.error, RewardError)
        assert error in str(completion.error)


@pytest.mark.parametrize(("template", "reason"), [
    (REFUSES_SYSTEM, "no system here"),
    (SYSTEM_FIRST, "it does not render all of them after the completion"),
])  # fmt: skip
def test_reply_that_the_template_cannot_append_is_an_error(template: str, reason: str) -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    tokenizer.chat_template = template
    models.check_continuations(tokenizer, [TURNS])
    game = Game()
    game.compute = lambda messages: [Message("system", "no"), Message("user", "no")]
    for completion in play(native(tokenizer), tokenizer, game, [TURNS])["1"]:
        assert isinstance(completion.error, RewardError)
        message = f"with the roles system, user, .*embedded .* \\({reason}\\); let `reply` return"
        assert re.search(message, str(completion.error))
        assert len(completion.messages) == 1


class RecordingTokenizer:
    """A tokenizer that records the lengths of the texts that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.lengths = tokenizer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("reply", [
    [Message("user", "no " * 1_000_000)], [Message("user", " " * 1_000_000)],
    [Message("user", "")] * 1_000_000,
])  # fmt: skip
def test_reply_longer_than_the_context_is_not_tokenized_whole(
    reply: list[Message], tokenizer: Any
) -> None:
    game, recorder = Game(), RecordingTokenizer(tokenizer)
    game.compute = lambda messages: reply
    for completion in play(native(tokenizer), recorder, game, [TURNS])["1"]:
        assert completion.finish_reason == "length" and completion.error is None
        assert len(completion.messages) == 1
    assert max(recorder.lengths) <= 128 * 128  # tokens, and characters of the longest token


# Interruptions.


def play_in_parts(
    engine: Any, tokenizer: Any, replies: Any, *, num_steps: int, sampling: Sampling = SAMPLING
) -> dict[str, list[Completion]]:
    """As `play`, but all groups are interrupted and resumed after every `num_steps` steps."""
    groups: dict[str, list[Completion]] = {}
    sampler, num_calls = Sampler(engine, tokenizer, max_turns=8), 0
    in_flight = [sampler.start(each, 3, sampling, replies=replies) for each in (TURNS, ONE_TURN)]
    while in_flight:
        for group in sampler.advance():
            groups[group.problem.id] = group.completions
            in_flight.remove(group)
        num_calls += 1
        if num_calls % num_steps == 0:
            sampler.interrupt(in_flight)
            assert (sampler.num_in_flight, engine.num_free()) == (0, 4)
            sampler.resume(in_flight)
    assert sampler.num_in_flight == 0
    return groups


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("opened", [native, hf])
def test_interrupted_groups_end_as_without_interruption(
    opened: Callable[[Any], RowEngine], num_steps: int, tokenizer: Any
) -> None:
    whole = play(opened(tokenizer), tokenizer, Game())
    counter = TokenCounter(opened(tokenizer))
    parts = play_in_parts(counter, tokenizer, Game(), num_steps=num_steps)
    for problem_id, completions in whole.items():
        for each, complete in zip(parts[problem_id], completions, strict=True):
            assert each.token_ids.tolist() == complete.token_ids.tolist()
            assert each.policy_steps.tolist() == complete.policy_steps.tolist()
            assert each.messages == complete.messages
    completions = [each for group in parts.values() for each in group]
    is_sampled = steps_of(completions) >= 0
    assert_exact_logprobs(completions, trainer_logprobs(model_of(), completions), is_sampled)
    assert counter.num_tokens == is_sampled.sum()  # none of them twice


@pytest.mark.parametrize("is_dropped", [False, True])
def test_interrupted_episode_keeps_its_reply_unless_dropped(
    is_dropped: bool, tokenizer: Any
) -> None:
    game, ended = Held(), list[RequestGroup]()
    sampler = Sampler(native(tokenizer), tokenizer, max_turns=8)
    group = sampler.start(TURNS, 3, SAMPLING, replies=game)
    while len(game.seen) < 3:
        ended += sampler.advance()
    sampler.interrupt([group])
    assert group.has_older_token(1) and not group.has_older_token(0)  # the turns are of step 0
    if is_dropped:
        sampler.drop([group])
        assert game.future.cancelled()
    else:
        game.future.set_result(None)
        sampler.resume([group])
    ended += sampler.advance()
    assert (sampler.num_resumed, sampler.num_in_flight) == (0, 0)
    assert ended == ([] if is_dropped else [group])
    assert len(game.seen) == 3
