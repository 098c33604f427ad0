"""Dry run: the prompts and the model of a run are checked before anything is trained.

Trainer, generators, verifiers and `bin/doctor` run these checks. Trainer and generators leave out
the same prompts, so that a sample index means the same problem everywhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from peralta_zmq import models, registry
from peralta_zmq.build.components import load_policy, make_scorer
from peralta_zmq.build.engines import engine_name, make_eval_sampling, make_sampling
from peralta_zmq.build.environments import open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments, Split
from peralta_zmq.errors import ConfigError, PeraltaError, program_name
from peralta_zmq.memory import Role
from peralta_zmq.models.rotary import check_length
from peralta_zmq.observe.terminal import track
from peralta_zmq.rollout import Problem

SPLITS: dict[Split, str] = {"train": "training", "eval": "held-out"}
COPY_TOKENIZER = "copy all tokenizer files of the model again, or correct its chat template"
RESIZE_EMBEDDINGS = (
    "resize the embeddings to the tokenizer (resize_token_embeddings), or remove added tokens"
)
logger = logging.getLogger(__name__)


class Finding(NamedTuple):
    """One line of the dry run."""

    name: str  # name of the check
    detail: str
    remedy: str = ""  # empty if there is nothing to do
    is_fatal: bool = False  # the run cannot start
    is_news: bool = False  # the user may not expect it, although there is nothing to do

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (self.detail, self.remedy)))


class PromptReader(NamedTuple):
    """The tokenizer that makes prompts, and the sizes of the model that reads them."""

    tokenizer: models.Tokenizer
    num_embeddings: int  # rows of the embedding of tokens
    context: int  # longest sequence of the model, in tokens

    @classmethod
    def of(cls, config: Config, tokenizer: models.Tokenizer | None = None) -> PromptReader:
        """The reader of the model whose folder has `tokenizer`; None = that of `model.name`."""
        trust = config.model.trust_remote_code
        if tokenizer is None:
            folder = models.model_folder(config.model.name)
            tokenizer = models.load_tokenizer(folder, trust_remote_code=trust)
        sizes = models.text_config(Path(tokenizer.name_or_path), trust_remote_code=trust)
        num_embeddings = getattr(sizes, "vocab_size", None) or sys.maxsize
        context = getattr(sizes, "max_position_embeddings", None) or sys.maxsize
        return cls(tokenizer, num_embeddings, context)


def check_run(
    config: Config, role: Role, *, with_weights: bool, with_prompts: bool
) -> Iterator[Finding]:
    """Check the model, loading its weights as the trainer does if `with_weights`, and all prompts.

    A generator without the model, which it gets from the trainer, checks its engine only. Raises
    ConfigError for a model that cannot be opened.
    """
    try:
        folder = models.model_folder(config.model.name)
    except ConfigError:
        if role == "trainer" or config.lora.rank is not None:
            raise
        folder = None
    try:
        engine, reason = engine_name(config, folder)
        registry.resolve("engine", engine)
        yield Finding("engine", f"{engine} ({reason})")
    except PeraltaError as error:  # no fault of a trainer, whose generators run elsewhere
        yield _finding_of("engine", error, is_fatal=role == "generator")
    if folder is None:
        return
    reader = PromptReader.of(config)
    trust = config.model.trust_remote_code
    try:
        sizes = models.text_config(folder, trust_remote_code=trust)
        check_length(sizes, config.engine.max_model_len)
        if with_weights:
            yield from _check_weights(config, folder)
    except PeraltaError as error:  # the prompts are checked all the same
        yield _finding_of("model", error)
    yield check_end_tokens(reader.tokenizer)
    for split in SPLITS if with_prompts else ():
        limit = config.eval.num_examples if split == "eval" else -1
        try:
            with closing(open_environments(config, split, limit=limit)) as environments:
                findings = check_prompts(config, environments, split, reader)[1]
        except PeraltaError as error:
            findings = [_finding_of("prompts", error)]
        yield from findings


def _check_weights(config: Config, folder: Path) -> Iterator[Finding]:
    """Load the model as the trainer does, and compare ways of computing."""
    model = load_policy(config, folder)
    size = f"{model.num_parameters() / 1e6:.1f} M parameters"
    yield Finding("model", f"{config.model.name}: {size}, loaded offline")
    reason = make_scorer(config, model).padding_reason
    yield Finding("training", reason or "packed rows: a prompt is computed once for its group")


def usable_environments(
    config: Config, environments: Environments, split: Split, reader: PromptReader
) -> Environments:
    """The environments without the prompts that `check_prompts` leaves out; logs the findings.

    Raises ConfigError if the run cannot start.
    """
    usable, findings = check_prompts(config, environments, split, reader)
    if fatal := [finding for finding in findings if finding.is_fatal]:
        more = f" ({len(fatal) - 1} more: see {program_name('doctor')})" if fatal[1:] else ""
        raise ConfigError(f"{fatal[0].text}{more}")
    log(findings)
    return usable


def log(findings: Sequence[Finding]) -> None:
    """Log findings, as a warning if there is something to do."""
    for finding in findings:
        level = logging.INFO if finding.is_news else logging.DEBUG
        logger.log(logging.WARNING if finding.remedy else level, "%s", finding.text)


def check_end_tokens(tokenizer: models.Tokenizer) -> Finding:
    """Name the tokens that end a completion of the model whose folder has the tokenizer."""
    folder = Path(tokenizer.name_or_path)
    if ends := models.folder_end_ids(folder, tokenizer):
        shown = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in ends)
        if differences := models.end_tokens_text(folder, tokenizer):
            return Finding("end token", differences, is_news=True)
        return Finding("end token", f"a completion ends with {shown}")
    detail = f"the model in {folder} has no end token, so that completions end at their limit only"
    return Finding("end token", detail, "set eos_token_id in its generation_config.json")


def check_prompts(
    config: Config, environments: Environments, split: Split, reader: PromptReader
) -> tuple[Environments, list[Finding]]:
    """The environments without prompts that are too long or empty, and the findings.

    Shows a progress bar if it takes long.
    """
    kept: list[Problem] = []
    sizes: dict[str, int] = {}
    findings: list[Finding] = []
    for env in config.environments if split == "train" else config.eval_environments:
        name = f"{SPLITS[split]} environment '{env.label}'"
        problems = [problem for problem in environments.problems if problem.task == env.label]
        sampling = (make_sampling if split == "train" else make_eval_sampling)(config, env, seed=0)
        check = _PromptCheck(
            reader,
            {*reader.tokenizer.all_special_ids, *reader.tokenizer.added_tokens_decoder},
            num_new=1 if sampling.fills_context else sampling.max_completion_length,
            limit=min(config.engine.max_model_len, reader.context),
            skips=env.overlong == "skip",
        )
        usable: list[Problem] = []
        longest = 0
        faults: dict[str, list[tuple[int, _Fault]]] = {}  # with their rows, by _Fault.what
        unread = track(f"checking the prompts of the {name}", iter(problems))
        prompts = models.chat_prompts(reader.tokenizer, unread)
        for problem, prompt in zip(problems, prompts, strict=True):
            if (fault := check.fault_of(problem, prompt)) is None:
                usable.append(problem)
                longest = max(longest, len(prompt))
            else:
                faults.setdefault(fault.what, []).append((problem.row, fault))
        if usable:
            detail = f"{name}: {len(usable)} prompts of at most {longest} tokens"
            findings.append(Finding("prompts", detail))
            has_turns = environments.has_turns(usable[0])
            findings += _check_template(name, usable, reader.tokenizer, has_turns=has_turns)
        for what, found in faults.items():
            worst = max((fault for _, fault in found), key=lambda fault: fault.num_tokens)
            is_skipped = worst.is_skipped and bool(usable)
            rows = ", ".join(f"row {row}{fault.value}" for row, fault in found[:3])
            more = f" and {len(found) - 3} more" if found[3:] else ""
            detail = f"{name}: {len(found)} of {len(problems)} prompts {what}"
            detail += f"{' and are skipped' if is_skipped else ''}: {rows}{more}"
            findings.append(Finding("prompts", detail, worst.remedy, is_fatal=not is_skipped))
        sizes[env.label] = len(usable)
        kept += usable
    return replace(environments, sizes=sizes, problems=tuple(kept)), findings


class _Fault(NamedTuple):
    what: str  # verb and object, for all prompts with this fault
    value: str  # property of this prompt, such as its length
    remedy: str
    is_skipped: bool = False  # True: not fatal, unless no prompt is left
    num_tokens: int = 0  # length of a prompt that is too long; the longest one's remedy is shown


class _PromptCheck(NamedTuple):
    reader: PromptReader
    special_ids: set[int]
    num_new: int  # tokens that a completion needs
    limit: int  # tokens of prompt and completion
    skips: bool  # data.overlong

    def fault_of(self, problem: Problem, prompt: list[int] | str) -> _Fault | None:
        """Why a prompt cannot be sampled; a text is the reason why the template refuses it."""
        tokenizer, num_embeddings, context = self.reader
        remedy = RESIZE_EMBEDDINGS
        if isinstance(prompt, str):
            has_system = any(message.role == "system" for message in problem.messages)
            remedy = f"correct the messages{' or remove data.system_prompt' * has_system}"
            return _Fault("are refused by the chat template", f" ({prompt})", remedy)
        if problem.input_token_ids:
            num_embeddings = min(num_embeddings, len(tokenizer))
            remedy = "make input_token_ids with the tokenizer of this model"
        elif not problem.question.strip():
            return _Fault("are empty", "", "fill them in, or remove the rows", is_skipped=True)
        elif self.special_ids.issuperset(prompt):
            text = tokenizer.decode(prompt)
            return _Fault("have special tokens only", f" ({text!r})", COPY_TOKENIZER)
        if unknown := [token for token in prompt if not 0 <= token < num_embeddings]:
            text = "" if problem.input_token_ids else f" {tokenizer.decode(unknown[:1])!r}"
            what = f"have tokens that are not among the {num_embeddings} of the model"
            return _Fault(what, f" (token {unknown[0]}{text})", remedy)
        if (needed := len(prompt) + self.num_new) <= self.limit:
            return None
        remedy = f"shorten them: the model reads {context} tokens"
        if needed <= context:
            remedy = f"shorten them, or raise engine.max_model_len to {needed}"
        what = f"do not fit into {self.limit} tokens with a completion of {self.num_new}"
        return _Fault(what, f" ({len(prompt)} tokens)", remedy, self.skips, len(prompt))


def _check_template(
    name: str, problems: Sequence[Problem], tokenizer: models.Tokenizer, *, has_turns: bool
) -> Iterator[Finding]:
    try:
        models.check_template_kwargs(tokenizer, problems)
        if has_turns:
            models.check_continuations(tokenizer, problems)
    except ConfigError as error:
        yield _finding_of("template", error)
    example = next((problem for problem in problems if not problem.input_token_ids), problems[0])
    for index, message in enumerate(example.messages):
        other = replace(message, content=f"{message.content} {message.content} 1")
        messages = (*example.messages[:index], other, *example.messages[index + 1 :])
        changed = replace(example, messages=messages)
        prompt, of_changed = models.chat_prompts(tokenizer, [example, changed])
        if prompt == of_changed and not example.input_token_ids:
            detail = f"{name}: prompts do not depend on the message of the {message.role}"
            is_fatal = index == len(example.messages) - 1
            yield Finding("template", detail, COPY_TOKENIZER, is_fatal=is_fatal)


def _finding_of(name: str, error: PeraltaError, *, is_fatal: bool = True) -> Finding:
    detail, _, remedy = str(error).partition("; ")
    return Finding(name, detail, remedy, is_fatal)
