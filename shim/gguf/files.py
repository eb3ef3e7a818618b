"""Finds every part of a GLM-5 GGUF and opens them as one model, or says in one line why that cannot be done."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from shim import process
from shim.gguf.reader import MAGIC, Header, MalformedHeader, Metadata, TensorInfo, read_header
from shim.gguf.tensor_types import PLAIN_TYPES, QUANT_TYPES

GIVE = "give a .gguf file, any part of a set, its directory, or directory:QUANT"
MOST_NAMED = 32  # missing parts
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")  # llama.cpp's gguf-split

_NUMPY_TYPES = {Type.F32: np.float32, Type.F16: np.float16}


class GGUFProblem(ValueError):
    """One line: what was found, what was expected, what to do. A letter that cannot be printed becomes "?"."""

    def __init__(self, line: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in line))


class WrongArchitecture(GGUFProblem):
    """A GGUF of another model. vLLM or its plugin may be able to serve it."""


@dataclass(frozen=True)
class Part:
    """One file of the set. `tensors`: how many it has. `data_offset`: the byte at which its data section starts."""

    path: Path
    tensors: int
    bytes: int
    data_offset: int


class _View:
    """A part's bytes. All tensors of a part share one memory map, which is closed when nobody holds a piece of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: Callable[[], np.ndarray | None] = lambda: None

    def whole(self) -> np.ndarray:
        """uint8 [bytes of the part], memory-mapped for reading."""
        found = self._map()
        if found is None:
            found = np.memmap(self.path, mode="r")
            self._map = weakref.ref(found)
        return found


@dataclass(frozen=True)
class Tensor:
    """One tensor, still in its file. `shape`: torch's order, the reverse of GGUF's. `offset`: from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: Type
    part: Path
    nbytes: int
    offset: int
    _view: _View = field(repr=False, compare=False)

    def raw(self) -> np.ndarray:
        """A read-only view of the file: float32 or float16 of `shape`; for any other type uint8, the last axis in
        bytes. The part is mapped while such a view is held."""
        flat = self._view.whole()[self.offset : self.offset + self.nbytes]
        if self.type in _NUMPY_TYPES:
            return flat.view(_NUMPY_TYPES[self.type]).reshape(self.shape)
        return flat.reshape(gguf.quant_shape_to_byte_shape(self.shape, self.type))


@dataclass(frozen=True)
class Model:
    """A complete GGUF: its parts in order, the first part's metadata, and every tensor by its GGUF name."""

    parts: list[Part]
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Does this file start with GGUF's magic? False for a directory, and for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def open_model(path: str | os.PathLike[str], *, arch: str = "glm-dsa") -> Model:
    """Opens the set of `path`: any part, a single file, a directory of one set, or `directory:QUANT`.

    Raises GGUFProblem if a part is missing, cut short, no GGUF, of another model or another architecture, or if it has
    a tensor of a type that cannot be read.
    """
    if not os.fspath(path):
        raise GGUFProblem("the path is empty; expected a .gguf file, a directory, or directory:QUANT")
    paths = part_paths(path)
    missing = [p.name for p in paths if not p.is_file()]
    if paths[0].is_file():
        first = _read_header(paths[0])
        _check_arch(paths[0], first.metadata, arch)
    if missing:
        if not paths[0].parent.is_dir():
            raise GGUFProblem(f"{paths[0].parent} does not exist; expected the directory of the {len(paths)} parts")
        named = ", ".join(missing[:MOST_NAMED]) + (", ..." if len(missing) > MOST_NAMED else "")
        raise GGUFProblem(
            f"{len(missing)} of {len(paths)} parts missing in {paths[0].parent}: {named}; "
            "download them into that directory"
        )
    headers = [first, *(_read_header(p) for p in paths[1:])]
    _check_split(paths, [header.metadata for header in headers], [len(header.tensors) for header in headers])
    parts: list[Part] = []
    tensors: dict[str, Tensor] = {}
    for p, header in zip(paths, headers, strict=True):
        parts.append(Part(p, len(header.tensors), header.file_bytes, header.data_offset))
        view = _View(p)
        own = [_tensor(view, header.data_offset, info) for info in header.tensors]
        for tensor in own:
            if tensor.name in tensors:
                raise GGUFProblem(
                    f"tensor {tensor.name} is in both {tensors[tensor.name].part.name} and {p.name}: "
                    "these are parts of different models; download one complete set"
                )
            tensors[tensor.name] = tensor
        _check_length(p, header.file_bytes, own)
        _check_layout(p, own, max(header.alignment, headers[0].alignment))
    return Model(parts, headers[0].metadata, tensors)


def fingerprint(model: Model) -> str:
    """A cache key of 32 hex digits. It changes when a part's header, size or time does, or the shim's own code."""
    digest = hashlib.sha256(process.identity().encode())
    for part in model.parts:
        stat = part.path.stat()
        digest.update(f"|{stat.st_size}|{stat.st_mtime_ns}|{part.data_offset}|".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.data_offset))
    return digest.hexdigest()[:32]


def part_paths(path: str | os.PathLike[str]) -> list[Path]:
    """Every path of the set, in order. It looks at names only, so a part may not exist."""
    given = Path(path)
    directory, colon, quant = os.fspath(path).rpartition(":")
    _check_access(given if os.path.isdir(given) or not colon else Path(directory))
    if os.path.isdir(given):
        return _set_in(given, "")
    if colon and not os.path.exists(given) and os.path.isdir(directory):
        if not quant:
            raise GGUFProblem(f"{os.fspath(path)} ends in a colon; expected {directory}:QUANT, or {directory}")
        return _set_in(Path(directory), quant)
    if "://" in os.fspath(path):
        raise GGUFProblem(f"{os.fspath(path)} is a URL; download its files first; {GIVE}")
    if os.path.exists(given) and not os.path.isfile(given):
        raise GGUFProblem(f"{given} is a FIFO, device or socket, expected a regular file; {GIVE}")
    name = PART_NAME.fullmatch(given.name)
    if name is None and not os.path.isfile(given):
        if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", os.fspath(path)) and given.suffix.lower() != ".gguf":
            raise GGUFProblem(
                f"{given} does not exist; if it is a repository, download its files first "
                f"({_download(os.fspath(path))}); {GIVE}"
            )
        raise GGUFProblem(f"{given} does not exist; {GIVE}")
    if name is None:
        _check_suffix(given, PART_NAME)
        return [given]
    number, count = int(name["number"]), int(name["count"])
    if not 1 <= number <= count:
        raise GGUFProblem(f"{given.name} is part {number} of {count}, and there is no such part; {GIVE}")
    return [given.with_name(n) for n in _part_names(name["stem"], count)]


def _check_access(path: Path) -> None:
    """GGUFProblem if a directory on the way may not be entered, or `path` not be listed: files would seem absent."""
    for place in (*reversed(path.parents), path):
        needed = os.R_OK | os.X_OK if place == path else os.X_OK
        if os.path.isdir(place) and not os.access(place, needed):
            raise GGUFProblem(f"{place} cannot be read: Permission denied; give its reader the right to")


def _download(repository: str) -> str:
    name, colon, quant = repository.partition(":")
    return f"hf download {name}" + (f" --include '*{quant}*'" if colon else "") + " --local-dir DIR"


def _part_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _check_suffix(file: Path, expected: re.Pattern[str]) -> None:
    """GGUFProblem if the name would be as `expected` with its suffix in small letters."""
    small = file.with_suffix(file.suffix.lower()).name
    if small != file.name and expected.fullmatch(small):
        raise GGUFProblem(f"{file.name} ends in {file.suffix}, expected .gguf in small letters; rename it to {small}")


def _set_in(directory: Path, quant: str) -> list[Path]:
    """The one set in a directory, or the one whose name contains `quant`. A set may be in a folder: unsloth's are."""
    sets: dict[Path, list[Path]] = {}
    for file in sorted([*directory.glob("*.gguf"), *directory.glob("*/*.gguf")]):
        if not os.path.isfile(file):  # a directory, or a file in a folder that may not be entered
            continue
        name = PART_NAME.fullmatch(file.name)
        stem = name["stem"] if name else file.stem
        sets[file.with_name(stem)] = part_paths(file)
    if not sets:
        for file in directory.glob("*.[gG][gG][uU][fF]"):
            _check_suffix(file, re.compile(r".+\.gguf"))
        raise GGUFProblem(f"no .gguf file in {directory}; give the path of a part")
    found = {stem: paths for stem, paths in sets.items() if quant.lower() in stem.name.lower()}
    exact = {stem: paths for stem, paths in found.items() if stem.name == quant}
    found = exact or found
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(stem.name for stem in (found or sets))
    if not found:
        raise GGUFProblem(f"no set in {directory} has {quant} in its name; there are: {names}")
    raise GGUFProblem(f"{len(found)} sets in {directory} match: {names}; choose one as {directory}:NAME")


def _read_header(path: Path) -> Header:
    try:
        return read_header(path)
    except OSError as error:
        raise GGUFProblem(f"{path.name} cannot be read: {error.strerror}; give its reader the right to") from None
    except EOFError as error:
        raise GGUFProblem(
            f"{path.name} is cut short: {path.stat().st_size} bytes found, and its header goes on after byte "
            f"{error.args[0]}; download it again"
        ) from None
    except MalformedHeader as error:
        raise GGUFProblem(f"{path.name} {error}") from None


def _check_arch(path: Path, metadata: Metadata, arch: str) -> None:
    found = metadata.get("general.architecture", "none")
    if found == "none" and "split.no" in metadata:  # only the first part has it
        number, count = metadata["split.no"] + 1, metadata.get("split.count", 0)
        raise GGUFProblem(f"{path.name} is part {number} of {count} under another name; give all their published names")
    if found == "none":
        raise WrongArchitecture(f"{path.name} does not say its architecture, expected {arch}; download it again")
    if found != arch:
        raise WrongArchitecture(f"{path.name} is of architecture {found}, expected {arch}; this shim serves GLM-5 only")


def _check_split(paths: list[Path], metadata: list[Metadata], counts: list[int]) -> None:
    """gguf-split gives each part split.no (from 0), split.count and split.tensors.count (of the whole set)."""
    first = metadata[0]
    advice = "these are not the parts of one model; download one complete set"
    for number, (path, own) in enumerate(zip(paths, metadata, strict=True)):
        number_and_count = (own.get("split.no", 0) + 1, own.get("split.count", 1) or 1)
        if number_and_count != (number + 1, len(paths)):
            raise GGUFProblem(
                f"{path.name} says it is part {number_and_count[0]} of {number_and_count[1]}, "
                f"expected part {number + 1} of {len(paths)}; "
                "give it back the name it was published under, or download the set again"
            )
        for key in own:
            same_model = key.startswith(("general.", "split.tensors.")) or key.endswith(".block_count")
            if same_model and own[key] != first.get(key):
                raise GGUFProblem(f"{path.name} has {key} {own[key]}, {paths[0].name} has {first.get(key)}: {advice}")
    promised = first.get("split.tensors.count", sum(counts))
    if promised != sum(counts):
        raise GGUFProblem(f"{sum(counts)} tensors in {len(paths)} parts, {paths[0].name} promises {promised}: {advice}")


def _tensor(view: _View, data_offset: int, info: TensorInfo) -> Tensor:
    path = view.path
    known = {t.value: t for t in (*PLAIN_TYPES, *QUANT_TYPES)}
    kind = known.get(info.type_number)
    if kind is None:
        number = info.type_number
        name = Type(number).name if number in {t.value for t in Type} else f"number {number}"
        raise GGUFProblem(
            f"tensor {info.name} in {path.name} is of type {name}, which is not supported; "
            "take a quantisation made of Q*_0, Q*_1, Q*_K, IQ*, TQ*, MXFP4 and NVFP4"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    elements = math.prod(info.shape)
    row = info.shape[-1] if info.shape else 1
    if not elements:
        raise GGUFProblem(f"tensor {info.name} in {path.name} has shape {info.shape}; download it again")
    if row % block:
        raise GGUFProblem(
            f"tensor {info.name} in {path.name} has rows of {row}, but {kind.name} needs a multiple of {block}; "
            "download it again"
        )
    nbytes = elements // block * block_bytes
    return Tensor(info.name, info.shape, kind, path, nbytes, data_offset + info.offset, view)


def _check_length(path: Path, size: int, tensors: list[Tensor]) -> None:
    expected = max((t.offset + t.nbytes for t in tensors), default=0)
    if size < expected:
        raise GGUFProblem(f"{path.name} is cut short: {size} bytes found, {expected} expected; download it again")


def _check_layout(path: Path, tensors: list[Tensor], alignment: int) -> None:
    """GGUFProblem if tensors overlap or leave a gap.

    A converter writes each tensor at the next multiple of the alignment, and llama.cpp reads no other files. Damaged
    offsets overlap. A damaged type with fewer bytes leaves a gap.
    """
    for one, other in itertools.pairwise(sorted(tensors, key=lambda t: t.offset)):
        gap = other.offset - (one.offset + one.nbytes)
        if not 0 <= gap < alignment:
            fault = "overlap" if gap < 0 else f"are {gap} bytes apart"
            raise GGUFProblem(
                f"tensors {one.name} and {other.name} {fault} in {path.name}: its header is corrupt; download it again"
            )
