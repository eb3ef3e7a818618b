from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from shim import process
from shim.gguf import files
from shim.gguf.files import GGUFProblem, WrongArchitecture, fingerprint, is_gguf, open_model
from shim.gguf.preflight import is_ours, names_gguf, problem_with
from shim.gguf.tiny import write_gguf


def problem(path: Path | str) -> str:
    with pytest.raises(GGUFProblem) as caught:
        open_model(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_any_part_opens_the_whole_set(tiny, tiny_model):
    assert [p.path.name for p in tiny_model.parts] == [f"tiny-glm5-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    assert [p.tensors for p in tiny_model.parts] == [0, 39, 39, 39]
    assert [p.bytes for p in tiny_model.parts] == [p.path.stat().st_size for p in tiny_model.parts]
    third = open_model(tiny.with_name("tiny-glm5-00003-of-00004.gguf"))
    assert third.parts == tiny_model.parts and third.tensors == tiny_model.tensors


def test_agrees_with_gguf_py_on_every_tensor_and_key(tiny_model):
    """gguf-py's reader is the reference for ours."""
    seen = 0
    for part in tiny_model.parts:
        reader = gguf.GGUFReader(part.path)
        assert part.data_offset == reader.data_offset
        for theirs in reader.tensors:
            ours = tiny_model.tensors[theirs.name]
            assert ours.type is theirs.tensor_type and ours.nbytes == theirs.n_bytes
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.raw().dtype == theirs.data.dtype
            assert np.array_equal(ours.raw(), theirs.data)
            seen += 1
    assert seen == len(tiny_model.tensors) == 117
    fields = gguf.GGUFReader(tiny_model.parts[0].path).fields
    assert set(tiny_model.metadata) == {key for key in fields if not key.startswith("GGUF.")}
    for key, value in tiny_model.metadata.items():
        theirs = fields[key].contents()
        assert value == (pytest.approx(theirs) if isinstance(value, float) else theirs), key


def test_metadata_is_plain_python_and_decoded_on_demand(tiny):
    model = open_model(tiny)
    assert "tokenizer.ggml.tokens" in model.metadata
    assert "tokenizer.ggml.tokens" not in model.metadata._values
    assert model.metadata["tokenizer.ggml.tokens"][:3] == ["!", '"', "#"]
    assert "tokenizer.ggml.tokens" in model.metadata._values
    assert repr(model.metadata["glm-dsa.attention.layer_norm_rms_epsilon"]) == "1e-05"
    assert model.metadata["glm-dsa.expert_weights_norm"] is True
    assert type(model.metadata["glm-dsa.block_count"]) is int
    assert model.metadata.get("no.such.key") is None


def test_raw_is_a_view_of_the_file(tiny_model):
    raw = tiny_model.tensors["blk.1.ffn_gate_exps.weight"].raw()
    base = raw
    while isinstance(base, np.ndarray) and base.base is not None:
        if isinstance(base, np.memmap):
            break
        base = base.base
    assert isinstance(base, np.memmap)
    assert raw.shape == (8, 256, 144)


def test_a_single_file_opens(make):
    model = open_model(make())
    assert len(model.parts) == 1 and model.metadata["general.name"] == "small"


def test_is_gguf(tiny, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 and so on")
    assert is_gguf(tiny)
    assert not is_gguf(tmp_path / "x.gguf")
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "absent.gguf")


# --- directories


def test_directory_with_one_set(tiny, tiny_model):
    assert open_model(tiny.parent).parts == tiny_model.parts


def test_directory_and_quant_name_pick_a_set(make, tmp_path):
    make(name="GLM-5-UD-Q4_K_XL", parts=3, at="UD-Q4_K_XL")  # as unsloth lays it out
    make(name="GLM-5-Q8_0")
    assert [p.path.name for p in open_model(f"{tmp_path}:UD-Q4_K_XL").parts][
        1
    ] == "GLM-5-UD-Q4_K_XL-00002-of-00003.gguf"
    assert [p.path.name for p in open_model(f"{tmp_path}:q8_0").parts] == ["GLM-5-Q8_0.gguf"]
    assert problem(tmp_path) == (
        f"2 sets in {tmp_path} match: GLM-5-Q8_0, GLM-5-UD-Q4_K_XL; choose one as {tmp_path}:NAME"
    )
    line = problem(f"{tmp_path}:IQ2")
    assert "no set" in line and "IQ2" in line and "GLM-5-Q8_0" in line


def test_a_whole_name_wins_over_a_longer_one(make, tmp_path):
    make(name="GLM-Q4_K")
    make(name="GLM-Q4_K_XL")
    assert open_model(f"{tmp_path}:GLM-Q4_K").parts[0].path.name == "GLM-Q4_K.gguf"
    assert "2 sets" in problem(f"{tmp_path}:Q4_K")


def test_empty_directory_and_absent_path(tmp_path):
    assert "no .gguf file in" in problem(tmp_path)
    assert "does not exist; give a .gguf file" in problem(tmp_path / "absent.gguf")


@pytest.mark.parametrize("name", ["pipe.gguf", "pipe", "x-00001-of-00001.gguf"])
def test_a_fifo_does_not_hang(tmp_path, name):
    os.mkfifo(tmp_path / name)
    line = problem(tmp_path / name)
    assert line.startswith(f"{tmp_path / name} is a FIFO, device or socket, expected a regular file; give a .gguf file")


def test_a_device():
    assert problem("/dev/null").startswith("/dev/null is a FIFO, device or socket, expected a regular file")


@pytest.mark.parametrize("name", ["unsloth/GLM-5-GGUF", "unsloth/GLM-5-GGUF:UD-Q4_K_XL"])
def test_a_repositorys_name(name):
    one_quant = " --include '*UD-Q4_K_XL*'" if ":" in name else ""
    advice = f"download its files first (hf download unsloth/GLM-5-GGUF{one_quant} --local-dir DIR)"
    assert problem(name).startswith(f"{name} does not exist; if it is a repository, {advice}")
    assert "repository" not in problem("models/x.gguf")


def test_a_url_a_colon_too_many_and_a_part_beyond_the_set(tmp_path):
    url = "https://huggingface.co/unsloth/GLM-5-GGUF/x.gguf"
    assert problem(url).startswith(f"{url} is a URL; download its files first; give a .gguf file")
    assert problem(f"{tmp_path}:") == f"{tmp_path}: ends in a colon; expected {tmp_path}:QUANT, or {tmp_path}"
    for number in (0, 3):
        (tmp_path / f"m-0000{number}-of-00002.gguf").touch()
        line = problem(tmp_path / f"m-0000{number}-of-00002.gguf")
        assert line.startswith(f"m-0000{number}-of-00002.gguf is part {number} of 2, and there is no such part; give")


def test_a_directory_that_may_not_be_entered(make, monkeypatch):
    """By what `os.access` says: the tests may run as root, who may do anything."""
    path = make(parts=3, at="closed/inner")
    closed = path.parent.parent
    monkeypatch.setattr(os, "access", lambda place, needed: Path(place) != closed)
    for named in (path, path.parent, f"{path.parent}:small", closed, path.parent / "absent.gguf"):
        assert problem(named) == f"{closed} cannot be read: Permission denied; give its reader the right to"
        assert problem_with(str(named)) == problem(named)
    assert names_gguf(str(closed)) and not is_ours(str(path))
    monkeypatch.undo()
    assert len(open_model(path.parent).parts) == 3


def test_many_missing_parts_are_not_all_named(make):
    path = make(parts=3)
    first = path.rename(path.with_name("small-00001-of-00999.gguf"))
    line = problem(first)
    assert line.startswith("998 of 999 parts missing in ") and len(line) < 1500 and ", ...; download" in line


def test_no_architecture(make):
    path = make()
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    line = problem(path)
    assert line == "small.gguf does not say its architecture, expected glm-dsa; download it again"


def test_a_suffix_in_capitals(make, tmp_path):
    part = make(parts=2)
    for path in (part, part.with_name("small-00002-of-00002.gguf")):
        path.rename(path.with_suffix(".GGUF"))
    fault = "ends in .GGUF, expected .gguf in small letters; rename it to small-00001-of-00002.gguf"
    assert problem(part.with_suffix(".GGUF")) == f"small-00001-of-00002.GGUF {fault}"
    assert "ends in .GGUF, expected .gguf in small letters; rename it to small-0000" in problem(tmp_path)
    whole = make(name="whole", at="one")
    assert open_model(whole.rename(whole.with_suffix(".GGUF"))).parts[0].path.name == "whole.GGUF"


# --- missing, mixed, cut


def test_every_missing_part_is_named_before_the_others_are_parsed(make, monkeypatch):
    path = make(parts=4)
    for number in (2, 4):
        path.with_name(f"small-0000{number}-of-00004.gguf").unlink()
    first = files.read_header(path)
    monkeypatch.setattr(files, "read_header", lambda p: first if p == path else pytest.fail(f"parsed {p}"))
    line = problem(path)
    assert line.startswith("2 of 4 parts missing") and "download" in line
    assert "small-00002-of-00004.gguf, small-00004-of-00004.gguf" in line
    assert "00001" not in line and "00003" not in line


def test_missing_parts_of_another_architecture_are_not_our_business(make):
    path = make(parts=3, metadata={"general.architecture": "llama"})
    path.with_name("small-00002-of-00003.gguf").unlink()
    with pytest.raises(WrongArchitecture):
        open_model(path)


def test_a_directory_that_is_not_there(tmp_path):
    assert problem(tmp_path / "no" / "x-00001-of-00010.gguf").startswith(f"{tmp_path}/no does not exist")
    with pytest.raises(GGUFProblem, match="the path is empty"):
        open_model("")


def test_one_missing_part_and_a_missing_first_part(make):
    path = make(parts=3)
    path.unlink()
    line = problem(path.with_name("small-00003-of-00003.gguf"))
    assert line.startswith("1 of 3 parts missing") and "small-00001-of-00003.gguf" in line
    assert "small-00001-of-00003.gguf" in problem(path)
    assert "small-00001-of-00003.gguf" in problem(path.parent)


def test_truncated_data_gives_both_sizes(make):
    path = make(parts=3).with_name("small-00003-of-00003.gguf")
    full = path.stat().st_size
    os.truncate(path, full - 100)
    line = problem(path)
    assert line == f"{path.name} is cut short: {full - 100} bytes found, {full} expected; download it again"


def test_a_later_part_under_another_name(make):
    path = make(parts=3)
    other = path.with_name("mine.gguf")
    other.write_bytes(path.with_name(path.name.replace("00001-of", "00002-of")).read_bytes())
    assert problem(other) == "mine.gguf is part 2 of 3 under another name; give all their published names"


def test_other_architecture(make):
    line = problem(make(metadata={"general.architecture": "llama"}))
    assert line == "small.gguf is of architecture llama, expected glm-dsa; this shim serves GLM-5 only"


def test_architecture_is_an_argument(make):
    path = make(metadata={"general.architecture": "llama"})
    assert open_model(path, arch="llama").metadata["general.architecture"] == "llama"


def test_parts_in_the_wrong_place(make):
    path = make(parts=3)
    second, third = (path.with_name(f"small-0000{n}-of-00003.gguf") for n in (2, 3))
    shutil.copy(second, third)
    line = problem(path)
    assert "small-00003-of-00003.gguf says it is part 2 of 3, expected part 3 of 3" in line


def test_a_renamed_part_alone(make, tmp_path):
    path = make(parts=3)
    alone = tmp_path / "alone.gguf"
    shutil.copy(path, alone)
    assert "alone.gguf says it is part 1 of 3, expected part 1 of 1" in problem(alone)


def test_parts_of_two_models_with_other_counts(make):
    path = make(parts=3)
    other = make(parts=3, name="other", tensors={"output.weight": None})
    shutil.copy(other.with_name("other-00003-of-00003.gguf"), path.with_name("small-00003-of-00003.gguf"))
    line = problem(path)
    assert "small-00003-of-00003.gguf has split.tensors.count" in line and "one complete set" in line


def test_parts_of_two_models_with_the_same_count(make, small_metadata, small_tensors):
    """The same tensors in another order, as another converter lists them."""
    path = make(parts=3)
    backwards = dict(reversed(small_tensors.items()))
    other = write_gguf(path.parent, "other", small_metadata, backwards, 3)
    shutil.copy(other.with_name("other-00003-of-00003.gguf"), path.with_name("small-00003-of-00003.gguf"))
    assert "is in both small-00002-of-00003.gguf and small-00003-of-00003.gguf" in problem(path)


def test_a_name_from_another_model_in_a_later_part(make):
    """Other splitters repeat general.* in every part."""
    path = make(parts=2)
    second = path.with_name("small-00002-of-00002.gguf")
    writer = gguf.GGUFWriter(second, "glm-dsa")
    writer.add_name("GLM-4")
    for key, value in (("no", 1), ("count", 2)):
        writer.add_uint16(f"split.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "small-00002-of-00002.gguf has general.name GLM-4, small-00001-of-00002.gguf has small" in problem(path)


def test_fewer_tensors_than_promised(make):
    line = problem(make(metadata={"split.tensors.count": 999}))
    assert "tensors in 1 parts, small.gguf promises 999" in line


@pytest.mark.parametrize(("number", "name"), [(15, "Q8_K"), (41, "Q1_0"), (139, "number 139")])
def test_unsupported_type_names_the_tensor(make, number, name):
    """139 is ik_llama's iq4_k: unknown to gguf-py, which cannot even list such a file."""
    path = make()
    data = path.read_bytes()
    at = data.index(b"blk.1.ffn_up_exps.weight") + len(b"blk.1.ffn_up_exps.weight") + 4 + 3 * 8
    path.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
    line = problem(path)
    assert f"tensor blk.1.ffn_up_exps.weight in small.gguf is of type {name}, which is not supported" in line


def test_rows_that_do_not_fill_blocks(make):
    path = make()
    data = path.read_bytes()
    at = data.index(b"blk.1.ffn_up_exps.weight") + len(b"blk.1.ffn_up_exps.weight") + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 100) + data[at + 8 :])
    assert "has rows of 100, but Q4_K needs a multiple of 256" in problem(path)


# --- fingerprint


def test_fingerprint_changes_with_content_time_and_the_shims_code(make, monkeypatch):
    path = make(parts=2)
    first = fingerprint(open_model(path))
    assert first == fingerprint(open_model(path)) and len(first) == 32
    second = path.with_name("small-00002-of-00002.gguf")
    stat = second.stat()
    os.utime(second, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    later = fingerprint(open_model(path))
    assert later != first
    os.utime(second, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(open_model(path)) == first
    monkeypatch.setattr(process, "identity", lambda: "0.1.0+another commit")
    assert fingerprint(open_model(path)) != first


def test_fingerprint_sees_the_header_even_with_equal_size_and_time(make):
    path = make()
    stat = path.stat()
    first = fingerprint(open_model(path))
    path.write_bytes(path.read_bytes().replace(b"small", b"smaLL", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(open_model(path)) != first
