"""The header reader: what it reads, what it refuses, and that damage is always one line."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shim
from shim.commands.gguf import report
from shim.gguf import reader
from shim.gguf.config import generation_config
from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.names import require_complete
from shim.gguf.preflight import problem_with
from shim.gguf.quantised_layers import quantised_layers
from shim.gguf.reader import MalformedHeader, read_header
from shim.gguf.tensor_parallel import Parallel, cut_problem
from shim.gguf.tiny import write_gguf
from shim.gguf.tokenizer import tables


def problem(path: Path) -> str:
    with pytest.raises(GGUFProblem) as caught:
        open_model(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def damaged(path: Path, change) -> str:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return problem(path)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(keys=(), tensors=(), counts=None, version=3) -> bytes:
    """Hand-made: keys and tensors are bytes already."""
    counts = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


@pytest.fixture
def read(tmp_path):
    def write_and_read(data: bytes):
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return read_header(path)

    return write_and_read


KINDS = [
    *((0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 2**32 - 1), (5, "i", -(2**31))),
    *((7, "?", True), (10, "Q", 2**64 - 1), (11, "q", -(2**63)), (12, "d", 0.1)),
]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("kind", "letter", "value"), KINDS)
def test_every_type_of_number_alone_and_in_an_array(read, version, kind, letter, value):
    one = string(b"one") + struct.pack(f"<I{letter}", kind, value)
    two = string(b"two") + struct.pack(f"<IIQ2{letter}", 9, kind, 2, value, value)
    found = read(header([one, two], version=version)).metadata
    assert dict(found) == {"one": value, "two": [value, value]}
    assert type(found["one"]) is type(found["two"][0]) is type(value)


def test_strings_and_floats(read):
    texts = string(b"s") + struct.pack("<IIQ", 9, 8, 3) + string(b"") + string("é".encode()) + string(b"\xff")
    keys = [string(b"f") + struct.pack("<If", 6, 1e-5), string(b"t") + struct.pack("<I", 8) + string(b"x"), texts]
    assert dict(read(header(keys)).metadata) == {"f": 1e-05, "t": "x", "s": ["", "é", "\ufffd"]}


def tensor(name: bytes, dimensions=(4, 2), kind=0, offset=0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def test_tensors_and_where_their_data_starts(read):
    align = string(b"general.alignment") + struct.pack("<II", 4, 128)
    found = read(header([align], [tensor(b"a"), tensor(b"b", (7,), 139, 256)]))
    assert found.tensors == [("a", (2, 4), 0, 0), ("b", (7,), 139, 256)]
    assert (found.alignment, found.data_offset) == (128, 256) and found.file_bytes < 256
    assert read(header([], [tensor(b"a")])).data_offset % 32 == 0


def key(kind: int, layout: str, *values: int, name: bytes = b"k") -> bytes:
    return string(name) + struct.pack(f"<I{layout}", kind, *values)


ALIGNMENT = b"general.alignment"
MALFORMED = {
    "two keys": (header([key(0, "B", 1)] * 2), "metadata key 'k' is listed twice"),
    "two tensors": (header([], [tensor(b"t")] * 2), "tensor 't' is listed twice"),
    "dimensions": (header([], [tensor(b"t", (1,) * 5)]), "tensor 't' has 5 dimensions, expected at most 4"),
    "type": (header([key(13, "B", 1)]), "metadata key 'k' is of type 13, which no GLM-5 has"),
    "nested": (header([key(9, "IQQQ", 9, 1, 0, 0)]), "metadata key 'k' is an array of type 9, which no GLM-5 has"),
    "letters": (header([key(0, "B", 1, name=b"\xff")]), "the name at byte 24 is not UTF-8"),
    "long name": (header([key(0, "B", 1, name=bytes(70000))]), "the name at byte 24 has 70000 bytes, expected at most"),
    "alignment 48": (header([key(4, "I", 48, name=ALIGNMENT)]), "general.alignment is not a power of two"),
    "alignment 0": (header([key(4, "I", 0, name=ALIGNMENT)]), "general.alignment is not a power of two"),
    "64 bits": (header([key(10, "Q", 32, name=ALIGNMENT)]), "general.alignment is not a power of two of type uint32"),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_named(read, data, message):
    with pytest.raises(MalformedHeader) as caught:
        read(data)
    line = str(caught.value)
    assert line.startswith(f"has a header that cannot be read: {message}") and line.endswith("; download it again")


ENDS = {
    "version": (b"GGUF\3\0", 4),
    "number of keys": (header()[:16], 16),
    "too many tensors": (header(counts=(2**60, 0)), 8),
    "too many keys": (header(counts=(0, 2**60)), 16),
    "value": (header([key(4, "B", 1)]), 37),
    "long string": (header([key(8, "Q", 2**62)]), 45),
    "long array": (header([key(9, "IQ", 4, 2**62)]), 41),
    "array": (header([key(9, "IQ", 4, 5) + bytes(19)]), 49),
    "array of strings": (header([key(9, "IQ", 8, 2) + string(b"ab") + bytes(6)]), 59),
    "tensor": (header([], [tensor(b"t")[:-1]]), 57),
}


@pytest.mark.parametrize(("data", "offset"), ENDS.values(), ids=ENDS)
def test_an_early_end_gives_the_offset_of_what_is_missing(read, data, offset):
    with pytest.raises(EOFError) as caught:
        read(data)
    assert caught.value.args == (offset,)


def test_a_length_that_reaches_into_the_weights(read, monkeypatch):
    monkeypatch.setattr(reader, "MOST_HEADER_BYTES", 100)
    with pytest.raises(MalformedHeader, match="cannot be read: it is longer than 100 bytes; download it again"):
        read(header([string(b"k") + struct.pack("<IQ", 8, 200)]) + bytes(1000))


LIMITED = """
import os, resource, sys
from shim.gguf.files import open_model
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = len(os.listdir("/proc/self/fd"))
model = open_model(sys.argv[1])
assert len(os.listdir("/proc/self/fd")) == before, "a file stays open"
views = [tensor.raw() for tensor in model.tensors.values() if tensor.part == model.parts[1].path]
assert len(os.listdir("/proc/self/fd")) == before + 1, "the tensors of a part share one map"
del views
assert len(os.listdir("/proc/self/fd")) == before, "a map stays open"
print(len(model.parts), sum(int(tensor.raw()[:1].size > 0) for tensor in model.tensors.values()))
"""


def test_more_parts_than_a_process_may_open_files(make, small_tensors):
    """Some publishers give each tensor a part of its own."""
    path = make(parts=len(small_tensors) + 1)
    limit = len(small_tensors) // 2
    command = [sys.executable, "-c", LIMITED, str(path), str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(Path(shim.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    parts, tensors = map(int, done.stdout.split())
    assert parts > limit and tensors == len(small_tensors)


def test_an_empty_file(tmp_path):
    (tmp_path / "empty.gguf").touch()
    assert problem(tmp_path / "empty.gguf") == "empty.gguf is empty, expected a GGUF; download it again"


def test_not_a_gguf(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<html>404</html>")
    assert problem(path) == "page.gguf is not a GGUF: it starts with b'<htm', expected b'GGUF'; download it again"


def test_malformed_header(make):
    path = make()
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 99)
    path.write_bytes(data)
    assert problem(path) == "small.gguf is a GGUF of version 99, expected 2 or 3; download it again, or another file"


def test_big_endian(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "glm-dsa", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in problem(tmp_path / "big.gguf")


def test_truncated_header(make):
    path = make(parts=3).with_name("small-00002-of-00003.gguf")
    os.truncate(path, 500)
    line = problem(path)
    assert line.startswith(f"{path.name} is cut short: 500 bytes found") and "header" in line


@pytest.fixture(scope="module")
def cut_me(tmp_path_factory, small_metadata):
    norm = {"output_norm.weight": (np.ones(256, dtype=np.float32), Type.F32)}
    path = write_gguf(tmp_path_factory.mktemp("cut"), "cut", small_metadata, norm)
    return path, path.read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_anywhere_is_a_problem_and_never_a_crash(cut_me, share):
    path, whole = cut_me
    path.write_bytes(whole[: int(len(whole) * share)])
    assert path.name in problem(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), min_size=1))
def test_damage_anywhere_in_a_header_is_a_line_or_goes_unnoticed_and_never_a_crash(cut_me, places):
    path, whole = cut_me
    data = bytearray(whole)
    end = len(whole) - 1024  # output_norm, the only tensor
    for share, value in places:
        at = 4 + int((end - 4) * share)
        data[at : at + len(value)] = value
    path.write_bytes(data)
    line = problem_with(str(path))
    assert line and "\n" not in line  # at the latest because most tensors are missing


def test_opening_a_full_size_tokenizer_is_fast(make):
    """GLM-5's own counts. gguf-py takes 20 s and more for this header; a slow CI machine gets a wide margin."""
    tokens, merges = 154880, 321649
    path = make(
        metadata={
            "tokenizer.ggml.tokens": [f"t{n}" for n in range(tokens)],
            "tokenizer.ggml.token_type": [1] * tokens,
            "tokenizer.ggml.merges": [f"a{n} b{n}" for n in range(merges)],
        },
    )
    start = time.perf_counter()
    model = open_model(path)
    assert time.perf_counter() - start < 3
    assert len(model.metadata["tokenizer.ggml.merges"]) == merges
    assert model.metadata["tokenizer.ggml.tokens"][-1] == f"t{tokens - 1}"


@pytest.mark.parametrize("count", [-1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("at", [8, 16])
def test_negative_and_huge_counts(make, at, count):
    line = damaged(make(), lambda data: data.__setitem__(slice(at, at + 8), struct.pack("<q", count)))
    assert "small.gguf" in line and "download it again" in line


def test_offsets_that_go_in_circles(make):
    name = b"blk.1.ffn_up_exps.weight"

    def same_offset(data):
        at = data.index(name) + len(name) + 4 + 3 * 8 + 4
        data[at : at + 8] = struct.pack("<Q", 0)

    assert "overlap in small.gguf" in damaged(make(), same_offset)


def test_a_type_of_fewer_bits_leaves_a_gap(make):
    name = b"blk.1.attn_norm.weight"

    def half(data):
        at = data.index(name) + len(name) + 4 + 8
        assert data[at : at + 4] == struct.pack("<I", 0)  # F32
        data[at : at + 4] = struct.pack("<I", 1)

    line = damaged(make(), half)
    assert "tensors blk.1.attn_norm.weight and " in line and " bytes apart in small.gguf: its header is corrupt" in line


@pytest.mark.parametrize("size", [0, 2**62])
def test_a_dimension_that_cannot_be(make, size):
    name = b"blk.0.attn_norm.weight"

    def resize(data):
        at = data.index(name) + len(name) + 4
        data[at : at + 8] = struct.pack("<Q", size)

    assert "download it again" in damaged(make(), resize)


def mutations(whole: bytes, number: int):
    """Near the names of keys, with one to four changes of one to eight bytes; the same ones every time."""
    rng = random.Random(16)
    places = [match.start() for match in re.finditer(rb"glm-dsa\.|general\.|tokenizer\.|split\.", whole)]
    for _ in range(number):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 4])):
            near = rng.choice(places) if rng.random() < 0.9 else rng.randrange(len(whole))
            at, width = min(len(whole) - 1, max(0, near + rng.randrange(-16, 90))), rng.choice([1, 1, 4, 8])
            values = [rng.randbytes(width), b"\xff" * width, bytes(width), b"\x80" + bytes(width - 1)]
            data[at : at + width] = rng.choice(values)
        yield bytes(data)


def test_a_mutated_header_is_fine_or_a_problem(tiny, tmp_path):
    """All that looks at a GGUF before vLLM loads it; anything but GGUFProblem fails the test."""
    for part in tiny.parent.iterdir():
        if part != tiny:
            (tmp_path / part.name).symlink_to(part)
    first = tmp_path / tiny.name
    fine = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a number that overflows
        for data in mutations(tiny.read_bytes(), 300):
            first.write_bytes(data)
            try:
                model = open_model(first)
                require_complete(model)
                tables(model)
                generation_config(model)
                quantised_layers(model)
                cut_problem(model, Parallel(2))
                report(model)
                fine += 1
            except GGUFProblem:
                pass
    assert 0 < fine < 100
