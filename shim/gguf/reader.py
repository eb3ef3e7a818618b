"""gguf-py's GGUFReader, made fast and strict enough to open a 400 GB set before a server starts.

Changes, all in how the header is walked (its layout is gguf-py's, GGUF version 2 and 3):
- an array stays one undecoded slice: gguf-py makes several numpy objects per element, which costs seconds on GLM-5's
  154,880 tokens and 321,649 merges;
- reading past the end raises EOFError, where numpy slicing would hand back fewer bytes in silence;
- tensors are listed, not viewed: an unknown type or a file cut inside its data must be reported by name, not crash;
- counts are believed only as far as the file's size allows, so that a corrupt one costs no time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.gguf_reader import ReaderField


class TensorInfo(NamedTuple):
    """One entry of the tensor list: shape in torch order, type as the raw ggml number, offset from the data section."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class HeaderReader(gguf.GGUFReader):
    """Reads a part's header. EOFError: the file ends inside it. ValueError or KeyError: it is malformed."""

    infos: list[TensorInfo]

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > self.data.size:
            raise EOFError(offset)
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item is gguf.GGUFValueType.STRING:
            size = self._strings_size(start, count)
        else:
            size = np.dtype(self.gguf_scalar_to_np[item]).itemsize * count
        body = self._get(start, np.uint8, size)
        return 12 + size, [body], [0], [gguf.GGUFValueType.ARRAY, item]

    def _strings_size(self, start: int, count: int) -> int:
        view = memoryview(self.data.data)
        offset = start
        if start + 8 * count > self.data.size:  # an empty string takes 8 bytes
            raise EOFError(offset)
        for _ in range(count):
            if offset + 8 > self.data.size:
                raise EOFError(offset)
            offset += 8 + struct.unpack_from("<Q", view, offset)[0]
        return offset - start

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        found: dict[str, ReaderField] = {}
        for _ in range(int(count)):
            field = self._get_tensor_info_field(offs)
            if field.name in found:  # also the end of a list that a wrong count leads into zeros
                raise ValueError(f"tensor {field.name!r} is listed twice")
            found[field.name] = field
            offs += sum(int(part.nbytes) for part in field.parts)
        return offs, list(found.values())

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.infos = []
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            self.infos.append(
                TensorInfo(
                    name=bytes(name).decode("utf-8"),
                    shape=tuple(int(n) for n in reversed(dims)),
                    type_number=int(raw_type[0]),
                    offset=int(offset[0]),
                )
            )


class Metadata(Mapping[str, Any]):
    """A GGUF's key-value section as plain Python values, each decoded when first asked for and then kept.

    A float32 becomes the shortest decimal that names it, which the converter was given: 1e-05, not 9.99999974e-06.
    """

    def __init__(self, fields: Mapping[str, ReaderField]) -> None:
        # gguf-py adds GGUF.version and the two counts, which no file holds as keys
        self._fields = {key: field for key, field in fields.items() if not key.startswith("GGUF.")}
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


def _decode(field: ReaderField) -> Any:
    kind = field.types[0]
    if kind is gguf.GGUFValueType.ARRAY:
        body = field.parts[field.data[0]].tobytes()
        if field.types[1] is gguf.GGUFValueType.STRING:
            return list(_strings(body))
        return np.frombuffer(body, dtype=gguf.GGUFReader.gguf_scalar_to_np[field.types[1]]).tolist()
    if kind is gguf.GGUFValueType.FLOAT32:
        return float(str(field.parts[-1][0]))
    if kind is gguf.GGUFValueType.STRING:
        return field.parts[-1].tobytes().decode("utf-8", "replace")
    return field.contents()


def _strings(body: bytes) -> Iterator[str]:
    offset = 0
    while offset < len(body):
        start = offset + 8
        offset = start + struct.unpack_from("<Q", body, offset)[0]
        yield body[start:offset].decode("utf-8", "replace")
