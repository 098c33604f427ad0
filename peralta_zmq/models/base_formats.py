"""Storage formats of the frozen base model of LoRA adapters, set by lora.base_dtype.

| format   | bytes per weight | stored as |
|----------|------------------|-----------|
| float32  | 4                | float32, as in full fine-tuning |
| bfloat16 | 2                | bfloat16 |
| int8     | 1 + 2 / 64       | blocks of 64 weights: an int8 code each, and one bfloat16 scale |
| nf4      | 1 / 2 + 2 / 64   | blocks of 64 weights: a 4-bit code each, and one bfloat16 scale |

int8 and nf4 are the formats of the linear layers of the blocks. Embeddings and the head are then
bfloat16. Vectors, such as the weights of norms, have bfloat16 values in float32.

A block is 64 consecutive weights of a matrix in row-major order; the last one may be shorter. Its
scale is the largest absolute value of its weights in bfloat16. A code is the index of the value in
[-1, 1] nearest to weight / scale: for nf4 among the 16 values of NF4 (QLoRA, arXiv 2305.14314),
for int8 among the multiples of 1 / 127. An unpacked weight is value * scale in float32, rounded to
bfloat16; for int8 it is code * (scale * (1 / 127)). These are single IEEE 754 operations, and tests
compare their bits on a CPU with those on CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # weights that share a scale
BYTES_PER_WEIGHT = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1 + 2 / BLOCK,
    "nf4": 1 / 2 + 2 / BLOCK,
}
PACKED_FORMATS = ("int8", "nf4")
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Blocks converted at a time: 2 MiB of float32, which the cache of a CPU holds, or 128 MiB on other
# devices, where many small kernels would take longer.
CHUNK_BLOCKS = 1 << 13
CHUNK_BLOCKS_OFF_CPU = 1 << 19
CELLS = 32  # parts of [-1, 1], each with at most one of the bounds between the codes of nf4


@dataclass(frozen=True, slots=True)
class PackedTensor:
    base_dtype: str
    shape: tuple[int, ...]
    codes: Tensor  # int8 [weights], or uint8 [weights / 2] with two codes of nf4, the first high
    scales: Tensor  # bfloat16 [blocks]

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        num_blocks = len(self.scales)
        result = torch.empty(num_blocks, BLOCK, dtype=dtype, device=self.codes.device)
        codes = self.codes.view(num_blocks, -1)
        decode = _decode_nf4 if self.base_dtype == "nf4" else _decode_int8
        size = CHUNK_BLOCKS if codes.device.type == "cpu" else CHUNK_BLOCKS_OFF_CPU
        for start in range(0, num_blocks, size):
            chunk = slice(start, start + size)
            result[chunk] = decode(codes[chunk], self.scales[chunk, None]).bfloat16()
        return result.view(-1)[: math.prod(self.shape)].view(self.shape)

    def checksum(self) -> str:
        digest = hashlib.sha256(f"{self.base_dtype} {BLOCK} {list(self.shape)}".encode())
        for tensor in (self.codes, self.scales):
            digest.update(tensor.cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def pack(weight: Tensor, base_dtype: str) -> PackedTensor:
    """Pack a matrix [out, in] on the CPU into the format `base_dtype`, int8 or nf4, in chunks."""
    weights = weight.detach().to("cpu", torch.bfloat16).reshape(-1)
    num_blocks = -(-len(weights) // BLOCK)
    width, dtype = (BLOCK // 2, torch.uint8) if base_dtype == "nf4" else (BLOCK, torch.int8)
    encode = encode_nf4 if base_dtype == "nf4" else _encode_int8
    codes = torch.empty(num_blocks, width, dtype=dtype)
    scales = torch.empty(num_blocks, dtype=torch.bfloat16)
    for start in range(0, num_blocks, CHUNK_BLOCKS):
        part = weights[start * BLOCK : (start + CHUNK_BLOCKS) * BLOCK].float()
        blocks = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        chunk = slice(start, start + len(blocks))
        scales[chunk] = largest[:, 0]  # exact: a weight in bfloat16
        codes[chunk] = encode(
            blocks * (1 / largest.clamp(min=2.0**-126))
        )  # normal, if all are zeros
    return PackedTensor(base_dtype, tuple(weight.shape), codes.view(-1), scales)


def digest_of(checksums: Mapping[str, str]) -> str:
    """Identifies packed matrices by their names and checksums: 16 hexadecimal digits."""
    lines = (f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def encode_nf4(values: Tensor) -> Tensor:
    """Codes uint8 [blocks, BLOCK / 2] of values [blocks, BLOCK] in [-1, 1].

    Several times as fast as torch.bucketize: only the bound of a value's cell is compared.
    """
    bounds, lowest = nf4_cells()
    cells = ((values + 1) * (CELLS / 2)).int().clamp_(0, CELLS).view(-1)
    is_above = values > bounds.index_select(0, cells).view_as(values)
    codes = lowest.index_select(0, cells).view_as(values) + is_above
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def _decode_nf4(codes: Tensor, scales: Tensor) -> Tensor:
    pairs = _nf4_pairs(codes.device).index_select(0, codes.reshape(-1).int())
    return pairs.view(torch.float32).view(-1, BLOCK) * scales.float()


def _encode_int8(values: Tensor) -> Tensor:
    return (values * 127).round().to(torch.int8)


def _decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * (scales.float() * (1 / 127))


@functools.cache
def nf4_cells() -> tuple[Tensor, Tensor]:
    """The bound in each cell, or infinity, float32 [CELLS + 1], and the code below it, uint8.

    The bounds are the midpoints between the values of NF4. The last cell has only the value 1.
    """
    values = torch.tensor(NF4)
    bounds = (values[:-1] + values[1:]) / 2
    edges = torch.arange(CELLS + 1) / (CELLS / 2) - 1
    lowest = torch.bucketize(edges, bounds)
    following = torch.cat([bounds, torch.tensor([math.inf])])[lowest]
    is_inside = following < edges + 2 / CELLS
    return following.where(is_inside, torch.tensor(math.inf)), lowest.to(torch.uint8)


@functools.cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """The two values of each byte, float32 [256, 2] viewed as int64 [256], which is read faster."""
    values = torch.tensor(NF4)
    high, low = torch.meshgrid(values, values, indexing="ij")
    return torch.stack([high, low], -1).view(-1).view(torch.int64).to(device)
