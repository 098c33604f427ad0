"""Formats of a frozen base model: values, sizes, checksums; bitsandbytes as the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peralta_zmq.config.training_sections import LoraSection
from peralta_zmq.models import base_formats
from peralta_zmq.models.base_formats import BLOCK, BYTES_PER_WEIGHT, NF4, PACKED_FORMATS, pack

# Largest distance of a value in [-1, 1] to the nearest one of the format, and 2^-8 for the rounding
# of the product with the scale to bfloat16.
MAX_ERROR = {"nf4": (NF4[1] - NF4[0]) / 2 + 2**-8, "int8": 1 / 254 + 2**-8}


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes.functional", reason="the extra optim is missing")


def test_nf4_equals_that_of_bitsandbytes(bitsandbytes: Any) -> None:
    assert tuple(bitsandbytes.get_4bit_type("nf4", device="cpu").tolist()) == NF4
    weight = matrix(96, 320)
    packed = pack(weight, "nf4")
    codes, state = bitsandbytes.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(packed.codes, codes.view(-1))
    assert torch.equal(packed.scales.float(), state.absmax)
    assert torch.equal(packed.unpack(), bitsandbytes.dequantize_4bit(codes, state))


def test_int8_equals_blocks_of_bitsandbytes(bitsandbytes: Any) -> None:
    weight = matrix(96, 320)
    values = torch.cat([torch.arange(-127, 128), torch.full([1], 127)]) / 127  # it needs 256
    codes, state = bitsandbytes.quantize_blockwise(weight.float(), code=values, blocksize=BLOCK)
    packed = pack(weight, "int8")
    assert torch.equal(packed.scales.float(), state.absmax)
    ours = (packed.codes.int() + 127).to(torch.uint8).view_as(codes)
    expected = bitsandbytes.dequantize_blockwise(ours, state)
    # Rounding to bfloat16, and another order of two products in float32.
    torch.testing.assert_close(packed.unpack(torch.float32), expected, rtol=2**-8, atol=0)
    # bitsandbytes does not always choose the nearest value.
    assert float((ours != codes).float().mean()) < 0.01
    theirs = bitsandbytes.dequantize_blockwise(codes, state)
    assert bool(((expected - weight).abs() <= (theirs - weight).abs() + 1e-6).all())


def test_codes_of_nf4_are_those_of_the_nearest_values() -> None:
    values, bounds = torch.tensor(NF4), base_formats.nf4_cells()[0]
    near = [torch.nextafter(bounds[bounds.isfinite()], torch.tensor(end)) for end in (-2.0, 2.0)]
    every = torch.cat([*near, bounds[bounds.isfinite()], torch.linspace(-1, 1, 8003)])
    padded = torch.cat([every, torch.zeros(-len(every) % BLOCK)]).view(-1, BLOCK)
    codes = base_formats.encode_nf4(padded).view(-1)
    found = torch.stack([codes >> 4, codes & 15], 1).view(padded.shape)
    expected = torch.bucketize(padded, (values[:-1] + values[1:]) / 2)
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**120])
def test_codes_of_a_packed_matrix_are_those_of_the_nearest_values(scale: float) -> None:
    weight = torch.linspace(-1, 1, 4 * BLOCK).bfloat16().view(4, BLOCK)
    weight[:, 0] = 1
    for base_dtype, values in (("nf4", torch.tensor(NF4)), ("int8", torch.arange(-127, 128) / 127)):
        packed = pack(weight * scale, base_dtype)
        codes = packed.codes
        if base_dtype == "nf4":
            codes = torch.stack([codes >> 4, codes & 15], 1)
        found = values[codes.view(weight.shape).long() + (127 if base_dtype == "int8" else 0)]
        nearest = (weight.float()[..., None] - values).abs().amin(-1)
        # 1e-6: float32 rounds the values, the bounds between them and these distances
        assert bool(((weight.float() - found).abs() <= nearest + 1e-6).all())
        assert packed.scales.tolist() == [scale] * 4


@pytest.mark.parametrize("base_dtype", PACKED_FORMATS)
@pytest.mark.parametrize("shape", [(48, 64), (3, 50), (1, 1), (2048, 200)])
def test_unpacked_weights_are_near_the_packed_ones(base_dtype: str, shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    weight.view(-1)[:BLOCK] = 0  # a block of zeros
    packed = pack(weight, base_dtype)
    unpacked = packed.unpack(torch.float32)
    assert unpacked.shape == weight.shape
    assert torch.equal(unpacked, packed.unpack().float())  # equal values in both dtypes
    scales = packed.scales.float().repeat_interleave(BLOCK)[: weight.numel()].view(shape)
    assert bool(((unpacked - weight.float()).abs() <= MAX_ERROR[base_dtype] * scales).all())
    assert torch.equal(pack(unpacked, base_dtype).unpack(), unpacked.bfloat16())


def test_formats_have_the_documented_sizes() -> None:
    weight = matrix(32, 128)
    for base_dtype in PACKED_FORMATS:
        packed = pack(weight, base_dtype)
        num_bytes = packed.codes.nbytes + packed.scales.nbytes
        assert num_bytes / weight.numel() == BYTES_PER_WEIGHT[base_dtype]
    annotation = LoraSection.model_fields["base_dtype"].annotation
    assert set(getattr(annotation, "__args__")) == set(BYTES_PER_WEIGHT)  # noqa: B009


@pytest.mark.parametrize("base_dtype", PACKED_FORMATS)
def test_checksum_identifies_every_value(base_dtype: str) -> None:
    packed = pack(matrix(4, 64), base_dtype)
    codes, scales = packed.codes.clone(), packed.scales.clone()
    codes[5] += 1
    scales[1] *= 2
    others = (
        replace(packed, codes=codes),
        replace(packed, scales=scales),
        replace(packed, shape=(64, 4)),
    )
    assert pack(matrix(4, 64), base_dtype).checksum() == packed.checksum()
    assert len({packed.checksum(), *(other.checksum() for other in others)}) == 4
    digest = base_formats.digest_of({"a": "1", "b": "2"})
    assert digest == base_formats.digest_of({"b": "2", "a": "1"})
    assert digest != base_formats.digest_of({"a": "2", "b": "1"})
