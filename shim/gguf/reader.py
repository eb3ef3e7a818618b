"""Reads the header of one GGUF part: its metadata and its list of tensors. No file stays open, no weight is read.

Layout (llama.cpp's gguf.md, versions 2 and 3, little-endian), from the first byte:

    "GGUF", version u32, number of tensors u64, number of metadata keys u64
    each key:     name, type u32, value
    each tensor:  name, number of dimensions u32, dimensions u64 (the innermost first), type u32, offset u64
    zeros up to a multiple of `general.alignment` (32 without that key); then the tensors' data, where offset 0 is

A string, and so a name, is its length u64 and its bytes. An array is the type u32 of its items, their number u64, and
the items.

Why not gguf-py's reader: it makes several objects for each of GLM-5's 154,880 tokens and 321,649 merges, which takes
20 s and more. It keeps every part mapped. And it does not notice that a file ends too early.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_HEADER_BYTES = 1 << 30  # a corrupt length must not make us copy the weights
MOST_NAME_BYTES = (1 << 16) - 1  # gguf.md's limit for a key
MOST_DIMENSIONS = 4
_STRING, _ARRAY, _FLOAT32, _UINT32 = 8, 9, 6, 4
_NUMBERS = {  # type number -> numpy type
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", _UINT32: "<u4", 5: "<i4", _FLOAT32: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class MalformedHeader(ValueError):
    """The message goes on after the name of the file: "is ..., expected ...; download it again"."""


class TensorInfo(NamedTuple):
    """One entry of the tensor list. `shape`: torch's order. `type_number`: ggml's. `offset`: in the data section."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class Field(NamedTuple):
    """A value as it is in the file. `item` is the type of an array's items, else None. `body` has no length."""

    kind: int
    item: int | None
    body: bytes


class Metadata(Mapping[str, Any]):
    """A GGUF's metadata as plain Python values. Each is decoded when it is first read, and then kept.

    A float32 becomes the shortest decimal that rounds to it: 1e-05, as the converter was given, not 9.99999974e-06.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = _decode(self._fields[key])
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Header(NamedTuple):
    """`data_offset`: the byte at which the data section starts. `file_bytes`: the size of the whole file."""

    metadata: Metadata
    tensors: list[TensorInfo]
    alignment: int
    data_offset: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Raises EOFError(offset) if the file ends inside its header, MalformedHeader, or OSError."""
    with path.open("rb") as file:
        _check_start(file.read(8))
        size = os.fstat(file.fileno()).st_size
        limit = min(size, MOST_HEADER_BYTES)
        with mmap.mmap(file.fileno(), limit, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(_Cursor(data), size)
            except EOFError:
                if limit == size:
                    raise
                raise _corrupt(f"it is longer than {limit} bytes") from None


def _check_start(start: bytes) -> None:
    if not start:
        raise MalformedHeader("is empty, expected a GGUF; download it again")
    if start[:4] != MAGIC:
        raise MalformedHeader(f"is not a GGUF: it starts with {start[:4]!r}, expected {MAGIC!r}; download it again")
    if len(start) < 8:
        raise EOFError(4)
    version = int.from_bytes(start[4:], "little")
    if int.from_bytes(start[4:], "big") in VERSIONS:
        raise MalformedHeader("is big-endian, expected little-endian; convert the model anew")
    if version not in VERSIONS:
        raise MalformedHeader(f"is a GGUF of version {version}, expected 2 or 3; download it again, or another file")


class _Cursor:
    """A place in the header. Each method returns what is at this place, and moves on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 8  # behind magic and version

    def skip(self, size: int) -> int:
        """Returns where the next `size` bytes start. EOFError if there are fewer."""
        start = self.at
        if size > len(self.data) - start:
            raise EOFError(start)
        self.at = start + size
        return start

    def u32(self) -> int:
        number: int = _U32.unpack_from(self.data, self.skip(4))[0]
        return number

    def u64(self) -> int:
        number: int = _U64.unpack_from(self.data, self.skip(8))[0]
        return number

    def count(self, least: int) -> int:
        """A number of things that take at least `least` bytes each. EOFError if the file cannot hold them."""
        start, number = self.at, self.u64()
        if number * least > len(self.data) - self.at:
            raise EOFError(start)
        return number

    def take(self, size: int) -> bytes:
        start = self.skip(size)
        return self.data[start : start + size]

    def name(self) -> str:
        start, size = self.at, self.u64()
        if size > MOST_NAME_BYTES:
            raise _corrupt(f"the name at byte {start} has {size} bytes, expected at most {MOST_NAME_BYTES}")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise _corrupt(f"the name at byte {start} is not UTF-8") from None

    def strings(self, number: int) -> bytes:
        """An array of strings, each with its length before it."""
        data, end, start, offset = self.data, len(self.data), self.at, self.at
        for _ in range(number):
            if offset + 8 > end:
                raise EOFError(offset)
            offset += 8 + _U64.unpack_from(data, offset)[0]
        return self.take(offset - start)


def _corrupt(what: str) -> MalformedHeader:
    return MalformedHeader(f"has a header that cannot be read: {what}; download it again")


def _parse(cursor: _Cursor, file_bytes: int) -> Header:
    n_tensors, n_keys = cursor.count(_LEAST_TENSOR_BYTES), cursor.count(_LEAST_KEY_BYTES)
    fields: dict[str, Field] = {}
    for _ in range(n_keys):
        key = cursor.name()
        if key in fields:
            raise _corrupt(f"metadata key {key!r} is listed twice")
        fields[key] = _field(cursor, key)
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        tensor = _tensor(cursor)
        if tensor.name in tensors:  # a wrong count that leads into zeros ends here, too
            raise _corrupt(f"tensor {tensor.name!r} is listed twice")
        tensors[tensor.name] = tensor
    alignment = _alignment(fields.get("general.alignment"))
    data_offset = -(-cursor.at // alignment) * alignment
    return Header(Metadata(fields), list(tensors.values()), alignment, data_offset, file_bytes)


def _field(cursor: _Cursor, key: str) -> Field:
    kind, item = cursor.u32(), None
    if kind == _STRING:
        return Field(kind, None, cursor.take(cursor.u64()))
    number = 1
    if kind == _ARRAY:
        item = cursor.u32()
        number = cursor.count(8 if item == _STRING else 1)
        if item == _STRING:
            return Field(kind, item, cursor.strings(number))
    numpy_type = _NUMBERS.get(kind if item is None else item)
    if numpy_type is None:  # an array of arrays, too
        what = f"of type {kind}" if item is None else f"an array of type {item}"
        raise _corrupt(f"metadata key {key!r} is {what}, which no GLM-5 has")
    return Field(kind, item, cursor.take(number * np.dtype(numpy_type).itemsize))


def _tensor(cursor: _Cursor) -> TensorInfo:
    name, n_dimensions = cursor.name(), cursor.u32()
    if n_dimensions > MOST_DIMENSIONS:
        raise _corrupt(f"tensor {name!r} has {n_dimensions} dimensions, expected at most {MOST_DIMENSIONS}")
    dimensions = [cursor.u64() for _ in range(n_dimensions)]
    return TensorInfo(name, tuple(reversed(dimensions)), cursor.u32(), cursor.u64())


def _alignment(field: Field | None) -> int:
    if field is None:
        return 32
    alignment = int.from_bytes(field.body, "little") if field.kind == _UINT32 else 0
    if alignment.bit_count() != 1:
        raise _corrupt("general.alignment is not a power of two of type uint32")
    return alignment


def _decode(field: Field) -> Any:
    if field.kind == _STRING:
        return field.body.decode("utf-8", "replace")
    if field.item == _STRING:
        return list(_strings(field.body))
    if field.item is not None:
        return np.frombuffer(field.body, dtype=_NUMBERS[field.item]).tolist()
    value = np.frombuffer(field.body, dtype=_NUMBERS[field.kind])[0]
    return float(str(value)) if field.kind == _FLOAT32 else value.item()


def _strings(body: bytes) -> Iterator[str]:
    offset = 0
    while offset < len(body):
        start = offset + 8
        offset = start + _U64.unpack_from(body, offset)[0]
        yield body[start:offset].decode("utf-8", "replace")
