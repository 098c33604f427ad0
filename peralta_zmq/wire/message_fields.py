"""Encoding and validation of all messages: bounded msgpack maps with typed fields.

A message is one frame (bytes): a msgpack map of field name -> value. The last field, `crc32`, is a
checksum of all bytes before its value. The sender of a frame may be hostile, so every length is
limited before memory is allocated. Most checks raise ValueError; the decoder of the message then
raises WireError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import count
from struct import pack
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgpack
from isal.isal_zlib import crc32  # same values as zlib's; 0.5 us instead of 6 for 24 KiB

from peralta_zmq.atomic_files import MAX_NAME, PLAIN_NAME
from peralta_zmq.errors import WireError

# Limits of any message.
MAX_MESSAGE = 16 << 20  # bytes; when a larger message arrives, libzmq closes the connection
MAX_TEXT = 1 << 10  # bytes of one string
MAX_ITEMS = 1 << 16  # keys of all maps of a message above 256 KiB
MAP_PREFIXES = {*range(0x80, 0x90), 0xDE, 0xDF}  # first byte of a msgpack map
MessageT = TypeVar("MessageT")


def unpack(frame: bytes, *, max_map_len: int = 64, max_maps: int = 1) -> dict[str, Any]:
    """Unpack a frame that is one msgpack map, without lists. Raises WireError.

    `max_map_len` limits the entries of each map, `max_maps` the number of maps, including the outer
    one, because the lengths of nested maps multiply. A large frame has at most MAX_ITEMS keys.
    """
    map_numbers = count(1)

    def count_map(unpacked: dict[str, Any]) -> dict[str, Any]:
        if next(map_numbers) > max_maps:
            raise ValueError(f"more than {max_maps} maps")
        return unpacked

    try:
        if len(frame) > 1 << 18:  # bytes; a small one takes little memory in any case
            _check_maps(frame, max_map_len, max_maps)
        message = cast(Any, msgpack).unpackb(
            frame,
            object_hook=count_map,
            max_map_len=max_map_len,
            max_str_len=MAX_TEXT,
            max_bin_len=MAX_MESSAGE,
            max_array_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a message: {error}") from None
    if type(message) is not dict:
        raise WireError(f"not a message: {type(message).__name__} is not a map")
    return message


def _check_maps(frame: bytes, max_map_len: int, max_maps: int) -> None:
    """Raise ValueError if a frame has too many or too long maps, without unpacking it.

    `unpackb` calls its `object_hook` only when a map is complete: of a thousand nested maps, all
    would be in memory before the first is counted.
    """
    unpacker = cast(Any, msgpack).Unpacker(max_buffer_size=len(frame))
    unpacker.feed(frame)
    # the frame is one item; a map adds its keys and values
    num_maps = 0
    num_items = 0
    items_left = 1
    while items_left:
        items_left -= 1
        first_byte = frame[unpacker.tell() : unpacker.tell() + 1]  # empty at the frame's end
        if not MAP_PREFIXES.intersection(first_byte):
            unpacker.skip()  # raises if the frame has ended
            continue
        num_maps = num_maps + 1
        length = unpacker.read_map_header()
        num_items += length
        if num_maps > max_maps or length > max_map_len or num_items > MAX_ITEMS:
            raise ValueError(f"more than {max_maps} maps, or too many keys")
        items_left += 2 * length


def check_type(value: Any, expected: type, name: str) -> Any:
    """Return `value`; ValueError if its type is not `expected`. True is not an int."""
    if type(value) is not expected:
        raise ValueError(f"{name}: {type(value).__name__} is not {expected.__name__}")
    return value


def _nonzero(record: Any) -> dict[str, int]:
    if not is_dataclass(record):
        raise ValueError(f"{record!a:.40} cannot be encoded")
    return {name: value for name, value in fields_of(record).items() if value}


def pack_with_checksum(message: dict[str, Any]) -> bytes:
    """Encode fields as one msgpack map, with the additional last field `crc32`."""
    placeholder = bytes(4)  # counted in the headers of the map, then replaced by the checksum
    entries = {**message, "crc32": placeholder}
    frame = cast(bytes, msgpack.packb(entries, default=_nonzero))[:-4]
    return frame + pack("<I", crc32(frame))


def check_checksum(frame: bytes, checksum: bytes | None) -> None:
    """Raise ValueError if `checksum` is None (missing), wrong, or not the last field."""
    residue = 0x2144DF1C  # the CRC-32 of any bytes followed by the CRC-32 of these bytes
    if crc32(frame) != residue or checksum != frame[-4:]:
        raise ValueError("checksum (crc32) does not match")


def fields_of(message: Any) -> dict[str, Any]:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return {name: value for name, value in values.items() if value is not None}


def encode_fields(message: Any) -> bytes:
    """Encode a dataclass of numbers, texts, bytes and dicts; fields that are None are left out.

    The values of a dict may be dataclasses with slots, of numbers that are 0 by default.
    """
    return pack_with_checksum(fields_of(message))


def decode_fields(
    frame: bytes,
    kind: type[MessageT],
    check: Callable[[MessageT], None] = lambda message: None,
    *,
    max_map_len: int = 64,
) -> MessageT:
    """Decode an object of the dataclass `kind` from a frame made by `encode_fields`.

    `check` raises ValueError if the object is invalid. Unknown fields are ignored and missing
    fields take their defaults. Raises WireError.
    """
    types = _field_types(kind)
    dicts = [each for each in types.values() if get_origin(each) is dict]
    num_dicts_of_records = sum(is_dataclass(get_args(each)[1]) for each in dicts)
    # A later version of the program may have more fields.
    max_maps = 1 + len(dicts) + num_dicts_of_records * max_map_len + 3
    values = unpack(frame, max_map_len=max_map_len, max_maps=max_maps)
    try:
        check_checksum(frame, values.get("crc32"))
        known = {name: value for name, value in values.items() if name in types}
        message = kind(**{n: _field_of(value, types[n], n) for n, value in known.items()})
        check(message)
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed {kind.__name__}: {error}") from None
    return message


@lru_cache
def _field_types(kind: type) -> dict[str, Any]:
    """The fields of a dataclass: name -> type, of an optional field without None."""
    return {
        name: get_args(expected)[0] if isinstance(expected, UnionType) else expected
        for name, expected in get_type_hints(kind).items()
    }


def _field_of(value: Any, expected: Any, name: str) -> Any:
    """The value of a field; ValueError if its type, or that of a key or value in it, is wrong."""
    if get_origin(expected) is not dict:
        return check_type(value, expected, name)
    key_type, value_type = get_args(expected)
    items = check_type(value, dict, name).items()
    if not is_dataclass(value_type):
        return {check_type(k, key_type, name): check_type(v, value_type, name) for k, v in items}
    return {check_type(k, key_type, name): _record_of(value_type, v, name) for k, v in items}


def _record_of(kind: Any, value: Any, name: str) -> Any:
    types = _field_types(kind)
    record = check_type(value, dict, name).items()
    return kind(
        **{field: check_type(v, types[field], field) for field, v in record if field in types}
    )


def check_identity(generator_id: str, incarnation: bytes) -> None:
    """Raise ValueError for an invalid incarnation or name, which is part of file names."""
    if len(generator_id) > MAX_NAME:
        raise ValueError(f"generator name of more than {MAX_NAME} characters; shorten it")
    if not PLAIN_NAME.fullmatch(generator_id):
        raise ValueError(
            f"generator name {generator_id!a:.40} is no plain name; use letters, digits, . _ and -"
        )
    if len(incarnation) != 8:
        raise ValueError(f"incarnation of {len(incarnation)} bytes instead of 8")


def check_owner(name: str, owner: str | None) -> None:
    """Raise WireError if the name in a message is not that of the CURVE key; None = no keys."""
    if owner is not None and name != owner:
        raise WireError(f"the key of {owner} was used under the name {name[:40]!a}")
