from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from exactness import is_as_exact_as_torch
from peak_memory import PeakMemory
from torch import Tensor

from peralta_zmq.models.head import head_logprobs

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE, CHUNK = 7, 16, 100, 32  # three chunks, and one of 4 tokens
CHUNK_BYTES = 4 * NUM_TOKENS * CHUNK
TEMPERATURES = torch.linspace(0.5, 1.5, NUM_TOKENS)


# With chunks of CHUNK tokens.
in_chunks = partial(head_logprobs, chunk_tokens=CHUNK)


def inputs(*, scale: float = 1.0, trained: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and token ids; the weight gives logits of up to 40 with scale 3."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=random).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=random) * scale
    token_ids = torch.tensor([0, 31, 32, 95, 96, 99, 50])  # first and last of chunks
    return hidden, weight.requires_grad_(trained), token_ids


def exact(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Result of `head_logprobs` [2, N] by the whole softmax in float64, and its two inputs."""
    hidden, weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    temperature = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    logprobs = (hidden @ weight.T / temperature).log_softmax(1)
    selected = logprobs.gather(1, token_ids[:, None])[:, 0]
    return torch.stack([selected, -(logprobs.exp() * logprobs).sum(1)]), hidden, weight


def assert_near(found: Tensor, expected: Tensor, *, within: float) -> None:
    assert (found - expected).norm() <= within * expected.norm()


@pytest.mark.parametrize("temperature", [0.7, TEMPERATURES])
@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("trained", "kept_bytes"), [(True, 0), (True, 2 * CHUNK_BYTES), (True, 1 << 20), (False, 0)]
)
def test_head_logprobs_match_float64_softmax_with_gradient(
    trained: bool, kept_bytes: int, *,
    with_entropy: bool, scale: float, temperature: Tensor | float,
) -> None:  # fmt: skip
    """The limits are those of fp32 sums of 16 products and 100 probabilities."""
    hidden, weight, token_ids = inputs(scale=scale, trained=trained)
    options: dict[str, Any] = {"with_entropy": with_entropy, "kept_bytes": kept_bytes}
    assert_exact(hidden, weight, token_ids, temperature, **options)


def assert_exact(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: Tensor | float,
    *,
    with_entropy: bool,
    kept_bytes: int,
) -> None:
    """Compare values and gradients with those of `exact`."""
    result, *exact_inputs = exact(hidden, weight, token_ids, temperature)
    result = result[: 1 + with_entropy]
    options = {"temperature": temperature, "with_entropy": with_entropy}
    found = in_chunks(hidden, weight, token_ids, kept_bytes=kept_bytes, **options)
    assert found.dtype == torch.float32 and found.shape == result.shape
    assert_near(found, result, within=1e-6)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    of_hidden, of_weight = torch.autograd.grad((result * upstream).sum(), exact_inputs)
    (found * upstream).sum().backward()
    assert hidden.grad is not None
    assert_near(hidden.grad, of_hidden, within=1e-5)
    assert (weight.grad is not None) == weight.requires_grad
    if weight.grad is not None:
        assert_near(weight.grad, of_weight, within=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_logit_of_minus_infinity_is_a_probability_of_zero(
    *, trained: bool, with_entropy: bool
) -> None:
    """The products of a chunk and a half overflow in fp32, but not in float64."""
    options: dict[str, Any] = {"with_entropy": with_entropy, "kept_bytes": CHUNK_BYTES}
    hidden, weight, _ = inputs(trained=trained)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0], weight[: CHUNK * 3 // 2, 0] = 1e20, 0, -1e20
    token_ids = torch.tensor([48, 63, 64, 95, 96, 99, 50])
    assert_exact(hidden, weight, token_ids, 0.7, **options)
    impossible = in_chunks(hidden, weight, torch.arange(NUM_TOKENS), **options)
    assert impossible[0].eq(-torch.inf).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_gives_equal_bits_without_gradient(*, with_entropy: bool) -> None:
    """Otherwise the ratio of a policy to itself before its first update would not be 1."""
    for trained in (True, False):
        hidden, weight, token_ids = inputs(trained=trained)
        found = in_chunks(hidden, weight, token_ids, with_entropy=with_entropy)
        with torch.no_grad():
            again = in_chunks(hidden, weight, token_ids, with_entropy=with_entropy)
        assert torch.equal(found, again)


def by_torch(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Result of `head_logprobs` by operators of torch."""
    return (hidden @ weight.T).float().log_softmax(1).gather(1, token_ids[:, None]).t()


@pytest.mark.parametrize("trained", [True, False])
def test_head_under_autocast_is_as_exact_as_torch(*, trained: bool) -> None:
    results = list[list[Tensor]]()
    for compute in (in_chunks, by_torch):
        hidden, weight, token_ids = inputs(trained=trained)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = compute(hidden, weight, token_ids)
        logprobs.sum().backward()
        tensors = [logprobs[0], hidden.grad, weight.grad]
        results.append([each for each in tensors if each is not None])
    assert not torch.equal(results[0][0], in_chunks(hidden, weight, token_ids)[0])
    (logprobs, _), *exact_inputs = exact(hidden, weight, token_ids, 1.0)
    expected = [logprobs, *torch.autograd.grad(logprobs.sum(), exact_inputs)][: 2 + trained]
    for ours, torchs, reference in zip(*results, expected, strict=True):
        assert ours.dtype == torch.float32
        assert is_as_exact_as_torch(ours, torchs, reference)


def peak_bytes(*, trained: bool, with_entropy: bool, **sizes: Any) -> int:
    """Peak of a forward and backward pass for 64 tokens and a vocabulary of 4096."""
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(4096, 4, requires_grad=trained)
    with PeakMemory() as memory:
        result = head_logprobs(
            hidden, weight, torch.arange(64) * 64, with_entropy=with_entropy, **sizes
        )
        result.sum().backward()
    return memory.peak


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_head_memory_is_a_few_chunks(*, trained: bool, with_entropy: bool) -> None:
    options: dict[str, Any] = {"trained": trained, "with_entropy": with_entropy}
    options["chunk_tokens"] = 128
    chunk, gradients = 4 * 64 * 128, 4 * 4 * 4096  # of the weight; the logits are 32 chunks
    assert peak_bytes(**options, kept_bytes=0) < 6 * chunk + gradients
    kept = 8 * chunk if trained or with_entropy else 0
    assert peak_bytes(**options, kept_bytes=8 * chunk) < 6 * chunk + gradients + kept
