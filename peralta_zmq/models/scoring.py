"""Logprobs of the tokens of a row of segments, with gradient: what the trainer learns from.

A row holds what siblings have in common once. Knows the model, its attention and its number
format; knows nothing of losses. The token before the first one of a branch is the one that the
branch comes after: tokens are shifted here and in `policy.token_logprobs`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from peralta_zmq.models import DTYPES, Model, choose_dtype, entropies, selected_logprobs
from peralta_zmq.rollout import PackedSequence, PrefixSpan

Int64Array: TypeAlias = NDArray[np.int64]

OURS = "peralta_zmq_segments"  # the name of our attention among transformers'
THEIRS = "sdpa"  # the attention in whose place it stands
TOLERANCE = 1e-3  # of logprobs, packed against padded, in fp32
NARROW = 128  # hidden size; the embedded model's 192 takes half the time in bfloat16 on a CPU
PLAIN = range(128, 513)  # tokens of a segment whose attention on a CPU is faster written out
TRIED = (  # a row on which a model is tried, with branches from branches
    PackedSequence((PrefixSpan(-1, 5), PrefixSpan(4, 3), PrefixSpan(5, 4))),
    PackedSequence((PrefixSpan(-1, 2), PrefixSpan(1, 6))),
)
TRIED_SCORED = (*range(5, 12), *range(14, 20))


def training_dtype(model: Model, name: str = "auto") -> tuple[torch.dtype, str]:
    """Number format of the trainer's matrix products, and the reason for it.

    `auto` decides by the machine and the model alone, so that a replay decides alike. On a CPU
    that multiplies bfloat16, small matrices lose more by the casts than they gain.
    """
    if name != "auto":
        return DTYPES[name], "as train.dtype says"
    native, reason = choose_dtype(model.device)
    if native != torch.bfloat16:
        return torch.float32, reason
    width = int(getattr(model.config, "hidden_size", NARROW))
    if model.device.type == "cpu" and width < NARROW:
        return torch.float32, f"auto: faster on a CPU below hidden size {NARROW}"
    return native, reason


class Scorer:
    """Scores rows packed, or padded when the model's attention cannot take the segments.

    `dtype` bfloat16 computes under autocast over the fp32 weights; float32 is exact. `note` says
    in one line why rows are padded; it is empty when they are packed.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._model, self._dtype = cast(Any, model), dtype
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        if gradient_checkpointing:
            _checkpoint_layers(model)
        self.note = self._try()

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the matrix products."""
        return self._dtype

    @property
    def packs(self) -> bool:
        """Whether a prompt is computed once for all of its completions."""
        return not self.note

    def __call__(
        self,
        token_ids: Tensor,  # [M]
        segments: Sequence[PackedSequence],  # in the order of the row, M tokens together
        scored: Tensor,  # [N], where in the row; tokens of completions
        *,
        temperature: Tensor | float = 1.0,  # one for all, or that of each scored token [N]
    ) -> Tensor:
        """log p of the scored tokens given what is before them, at the temperature, [N]."""
        if isinstance(temperature, Tensor):
            logits = self._logits(token_ids, segments, scored)
            return selected_logprobs(logits, token_ids[scored], temperature=temperature)
        once, again = scored.unique(return_inverse=True)  # siblings share tokens
        logits = self._logits(token_ids, segments, once)
        return selected_logprobs(logits, token_ids[once], temperature=temperature)[again]

    def with_entropy(
        self,
        token_ids: Tensor,
        segments: Sequence[PackedSequence],
        scored: Tensor,
        *,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The same, and the entropy of what could have stood there, in nats, both [N]."""
        logits = self._logits(token_ids, segments, scored)
        chosen = selected_logprobs(logits, token_ids[scored], temperature=temperature)
        return chosen, entropies(logits, temperature=temperature)

    def _logits(
        self, token_ids: Tensor, segments: Sequence[PackedSequence], scored: Tensor
    ) -> Tensor:
        """[N, V] at the tokens before the scored ones."""
        predict = self._packed if self.packs else self._padded
        return predict(token_ids, segments, scored)

    def _packed(
        self, token_ids: Tensor, segments: Sequence[PackedSequence], scored: Tensor
    ) -> Tensor:
        layout = _Layout.of(segments, token_ids.device)
        with self._autocast(token_ids.device), _rows_apart(self._model):
            out = self._model(
                input_ids=token_ids[None],
                position_ids=layout.positions[None],
                attention_mask=layout.no_mask,
                logits_to_keep=layout.previous[scored],
                use_cache=False,
                segments=layout,
            )
        return out.logits[0]

    def _padded(
        self, token_ids: Tensor, segments: Sequence[PackedSequence], scored: Tensor
    ) -> Tensor:
        places, attention, cells = _Padded.of(segments, token_ids.device)
        row, column = cells[scored].unbind(1)
        kept = places.shape[1] - int(column.min()) + 1
        with self._autocast(token_ids.device), _rows_apart(self._model):
            out = self._model(
                input_ids=token_ids[places] * attention, attention_mask=attention,
                use_cache=False, **({"logits_to_keep": kept} if self._keeps else {}),
            )  # fmt: skip
        return out.logits[row, column - 1 - (places.shape[1] - out.logits.shape[1])]

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32)

    @torch.no_grad()
    def _try(self) -> str:
        """Why rows cannot be packed; empty when both ways agree on a row of random tokens."""
        if not self._keeps:
            return "padded rows: the model cannot leave out logits"
        kinds = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            return f"padded rows: the model has {', '.join(sorted(kinds))}"
        theirs = self._model.config._attn_implementation
        if theirs not in (THEIRS, OURS):
            return f"padded rows: the model's attention is {theirs}"
        scored = torch.tensor(TRIED_SCORED, device=self._model.device)
        random, vocab = torch.Generator().manual_seed(0), int(self._model.config.vocab_size)
        length = sum(each.num_tokens for each in TRIED)
        tokens = torch.randint(vocab, (length,), generator=random).to(self._model.device)
        chosen, self._dtype = self._dtype, torch.float32
        self._model.config._attn_implementation = OURS
        try:
            packed, padded = (
                selected_logprobs(way(tokens, TRIED, scored), tokens[scored])
                for way in (self._packed, self._padded)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return f"padded rows: {str(error).splitlines()[0]}"
        finally:
            self._dtype = chosen
        apart = float((packed - padded).abs().max())
        return "" if apart < TOLERANCE else f"padded rows: packed ones differ by {apart:.2g}"


class _Segment:
    """A segment as arrays; place t speaks about its token t."""

    def __init__(self, segment: PackedSequence) -> None:
        length, self.num_branches = segment.num_tokens, len(segment.branches)
        self.position = np.zeros(length, np.int64)  # in its own sequence
        self.previous = np.zeros(length, np.int64)  # place of the token before; its own if none is
        self.branch = np.zeros(length, np.int64)
        self.sees = np.zeros((length, length), np.bool_)
        start = 0
        for number, (after, size) in enumerate(segment.branches):
            end, depth = start + size, 0 if after < 0 else self.position[after] + 1
            self.position[start:end] = np.arange(depth, depth + size)
            self.previous[start:end] = np.arange(start - 1, end - 1)
            self.previous[start] = start if after < 0 else after
            self.branch[start:end] = number
            self.sees[start:end, start:end] = np.tri(size, dtype=np.bool_)
            if after >= 0:
                self.sees[start:end, :start] = self.sees[after, :start]
            start = end

    def path(self, branch: int) -> Int64Array:
        """Places of the sequence that ends with the last token of a branch."""
        return np.flatnonzero(self.sees[np.flatnonzero(self.branch == branch)[-1]])


class _Layout(NamedTuple):
    """What a packed forward needs beside the tokens; every layer's attention gets it."""

    positions: Tensor  # int64 [M]
    previous: Tensor  # int64 [M]
    sizes: list[int]  # tokens of each segment
    masks: list[Tensor]  # bool [T, T] of each segment, True where a token sees another
    no_mask: Tensor  # four dimensions, so that transformers makes no mask of its own

    @classmethod
    def of(cls, segments: Sequence[PackedSequence], device: torch.device) -> _Layout:
        known = [_Segment(each) for each in segments]
        sizes = [each.num_tokens for each in segments]
        starts = np.cumsum([0, *sizes[:-1]])
        previous = [each.previous + start for each, start in zip(known, starts, strict=True)]
        return cls(
            positions=torch.from_numpy(np.concatenate([each.position for each in known])).to(
                device
            ),
            previous=torch.from_numpy(np.concatenate(previous)).to(device),
            sizes=sizes,
            masks=[torch.from_numpy(each.sees).to(device) for each in known],
            no_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        )


class _Padded(NamedTuple):
    """Each branch with what it comes after, a row each, padded on the right."""

    places: Tensor  # int64 [S, T], in the packed row
    attention: Tensor  # int64 [S, T], 1 on real tokens
    cells: Tensor  # int64 [M, 2], row and column of each token of the packed row

    @classmethod
    def of(cls, segments: Sequence[PackedSequence], device: torch.device) -> _Padded:
        paths, cells = list[Int64Array](), list[Int64Array]()
        start = 0
        for segment in segments:
            known = _Segment(segment)
            cells.append(np.stack([len(paths) + known.branch, known.position], 1))
            paths += [start + known.path(each) for each in range(known.num_branches)]
            start += segment.num_tokens
        longest = max(map(len, paths))
        places, attention = (np.zeros((len(paths), longest), np.int64) for _ in range(2))
        for row, path in enumerate(paths):
            places[row, : len(path)] = path
            attention[row, : len(path)] = 1
        found = (places, attention, np.concatenate(cells))
        return cls(*(torch.from_numpy(each).to(device) for each in found))


def _attention(
    module: Any,
    query: Tensor,  # [1, heads, M, D]
    key: Tensor,  # [1, H, M, D]
    value: Tensor,
    mask: Tensor | None,
    *,
    segments: _Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Segment by segment, so that no token is compared with another segment's.

    Without segments (an engine over the same model) it is transformers' own.
    """
    if segments is None:
        return AttentionInterface()[THEIRS](module, query, key, value, mask, **options)
    if options.get("softcap") is not None:
        raise ValueError("the model caps its attention scores")
    queries, keys, values = (each.split(segments.sizes, 2) for each in (query, key, value))
    seen = [
        _seen(*each, scaling=options["scaling"])
        for each in zip(queries, keys, values, segments.masks, strict=True)
    ]
    return torch.cat(seen, 2).transpose(1, 2), None


def _seen(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, *, scaling: float) -> Tensor:
    """Attention of one segment; torch's own is slow in bfloat16 backwards on a CPU."""
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    if len(sees) in PLAIN:
        return _seen_plainly(query, key, value, sees, scaling=scaling)
    with torch.autocast("cpu", enabled=False):
        return _seen(query.float(), key.float(), value.float(), sees, scaling=scaling)


def _seen_plainly(
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,
    sees: Tensor,  # [T, T]
    *,
    scaling: float,
) -> Tensor:
    """The same written out, with bfloat16 products; query heads that share keys stand in line."""
    _, heads, length, width = query.shape
    lined = (query * scaling).reshape(key.shape[1], -1, width)
    bias = torch.zeros(length, length).masked_fill_(~sees, float("-inf"))
    scores = torch.bmm(lined, key[0].transpose(1, 2)).view(
        -1, heads // key.shape[1], length, length
    )
    shares = (scores + bias).softmax(-1).view(len(lined), -1, length)
    return torch.bmm(shares, value[0]).view(1, heads, length, width)


@contextlib.contextmanager
def _rows_apart(model: Any) -> Generator[None, None, None]:
    """Add the gradient of an input embedding that is the head's too to the head's, row by row.

    autograd would make a second one of the whole vocabulary and add the two up, which takes
    0.6 GiB at Qwen3-0.6B's shape. Off a CPU it is left to autograd. Who asks for gradients
    otherwise than by `backward()` misses this part.
    """
    embedding = model.get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    tied = getattr(model.get_output_embeddings(), "weight", None) is weight
    plain = type(embedding) is torch.nn.Embedding and not embedding.scale_grad_by_freq
    if not (tied and plain and weight.requires_grad and weight.device.type == "cpu"):
        yield
        return

    def apart(_: Any, asked: tuple[Tensor], rows: Tensor) -> Tensor:
        if not rows.requires_grad:
            return rows
        rows = rows.detach().requires_grad_()
        rows.register_hook(partial(_add_rows, embedding, asked[0].flatten()))
        return rows

    handle = embedding.register_forward_hook(apart)
    try:
        yield
    finally:
        handle.remove()


def _add_rows(embedding: torch.nn.Embedding, token_ids: Tensor, gradient: Tensor) -> None:
    """What came for the rows of `token_ids` [M], `gradient` [.., H], into `weight.grad` [V, H]."""
    weight = embedding.weight
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = gradient.reshape(len(token_ids), -1).to(weight.dtype)
    if embedding.padding_idx is not None:  # its row learns nothing, as autograd has it
        gradient = gradient.masked_fill((token_ids == embedding.padding_idx)[:, None], 0)
    weight.grad.index_add_(0, token_ids, gradient)


def _checkpoint_layers(model: Model) -> None:
    """Keep only the inputs of layers, and compute each again in the backward pass.

    transformers does so in training mode only; the modules inside stay without dropout.
    """
    cast(Any, model).activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


AttentionInterface.register(OURS, _attention)
AttentionMaskInterface.register(OURS, AttentionMaskInterface()[THEIRS])
