"""The benchmark's parts that need no GPU: index sets, the roofline's arithmetic, records, the file and the plot."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shim.kernels import bench, build, roofline  # noqa: E402
from shim.kernels.sparse_mla.overlap import WINDOW, distinct_rows, overlapping_indices  # noqa: E402


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_neighbours_share_as_much_as_keep(keep: float) -> None:
    tokens, topk, keys = 12, 256, 20_000
    rows = overlapping_indices(tokens, topk, keys, keep, generator())
    assert rows.shape == (tokens, topk) and rows.dtype == torch.int32
    sets = [set(row.tolist()) for row in rows]
    assert all(len(s) == topk for s in sets)  # distinct
    for t, s in enumerate(sets):
        assert min(s) >= 0 and max(s) <= keys - tokens + t  # its own position at the latest
    shared = [len(a & b) for a, b in itertools.pairwise(sets)]
    assert shared == [round(keep * topk)] * (tokens - 1)


def test_tokens_further_apart_share_less() -> None:
    rows = overlapping_indices(9, 2048, 200_000, 0.8, generator(1))
    sets = [set(row.tolist()) for row in rows]
    for apart in (2, 4, 8):
        share = len(sets[0] & sets[apart]) / 2048
        assert 0.8**apart - 0.05 < share < 0.8**apart + 0.08, apart


def test_half_of_what_is_drawn_is_recent() -> None:
    tokens, topk, keys = 64, 1024, 100_000
    rows = overlapping_indices(tokens, topk, keys, 0.5, generator(2))
    age = keys - tokens + torch.arange(tokens)[:, None] - rows
    recent = float((age < WINDOW * topk).float().mean())
    assert 0.45 < recent < 0.60  # a half, without what was drawn twice, and a few of the other half
    far = age[age >= WINDOW * topk].float()
    assert abs(float(far.mean()) / ((keys + WINDOW * topk) / 2) - 1) < 0.05  # uniform


def test_every_token_sees_all_keys_unless_causal() -> None:
    rows = overlapping_indices(200, 64, 400, 0.0, generator(3), causal=False)
    assert rows.min() >= 0 and rows[:50].max() > 250
    assert overlapping_indices(200, 64, 400, 0.0, generator(3))[:50].max() < 250


def test_a_short_prompt_is_chosen_whole() -> None:
    rows = overlapping_indices(40, 32, 40, 0.9, generator(4))  # token t sees t + 1 positions
    for t in range(40):
        chosen = rows[t][rows[t] >= 0]
        assert len(chosen) == min(t + 1, 32) == len(chosen.unique())
        assert (rows[t, len(chosen) :] == -1).all() and chosen.max() <= t
    assert set(rows[10, :11].tolist()) == set(range(11))


def test_no_order_and_no_slot_is_kept() -> None:
    first, second = overlapping_indices(2, 1024, 50_000, 1.0, generator(5))
    assert set(first.tolist()) == set(second.tolist())
    assert (first == second).sum() < 20
    assert not torch.equal(first, first.sort().values)


@pytest.mark.parametrize(
    "wrong", [{"keep": 1.5}, {"keep": -0.1}, {"topk": 0}, {"keys": 3}, {"tokens": -1}], ids=lambda w: next(iter(w))
)
def test_bad_arguments_are_named(wrong: dict) -> None:
    given = {"tokens": 4, "topk": 2, "keys": 10, "keep": 0.5} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        overlapping_indices(generator=generator(), **given)


@pytest.mark.parametrize("keep", [None, 0.5, 0.9])
def test_distinct_rows_are_estimated(keep: float | None) -> None:
    tokens, topk, keys = 128, 512, 65_536
    if keep is None:
        rows = torch.randint(keys, (tokens, topk), generator=generator(6))
    else:
        rows = overlapping_indices(tokens, topk, keys, keep, generator(6))
    assert abs(len(rows.unique()) / distinct_rows(tokens, topk, keys, keep) - 1) < 0.1


def test_bytes_and_flops_by_hand() -> None:
    one = roofline.sparse_mla(1, 8, "bf16")
    # 2,048 rows of 1,152 bytes; positions; 8 heads of q (1,152), out (1,024) and lse (4)
    assert one.bytes == 2_359_296 + 8_192 + 8 * (1_152 + 1_024 + 4) == 2_384_928
    assert one.flops == 2 * 8 * 2048 * 1088 == 35_651_584
    assert math.isclose(one.distinct_bytes, one.bytes)
    assert roofline.sparse_mla(1, 8, "fp8").bytes == 1_343_488 + 8_192 + 17_440
    # 2 queries of 4 keys see 3 and 4
    assert roofline.indexer_prefill(2, 4, 32, causal=True).flops == 2 * 128 * 32 * 7
    assert roofline.indexer_prefill(2, 4, 32, causal=False).flops == 2 * 128 * 32 * 8
    # q and weights; k and scales; 7 logits
    assert roofline.indexer_prefill(2, 4, 32, causal=True).bytes == 2 * 32 * 132 + 4 * 132 + 28
    # 64 keys: 132 bytes each, a logit each, one table entry
    assert roofline.indexer_paged(1, 64, 32).bytes == 32 * 132 + 64 * 136 + 4
    assert roofline.topk(4, 131_072).bytes == 4 * (131_072 + 2_048) * 4


def test_times_by_hand() -> None:
    # 2.384928 MB at 1,792 GB/s; 35.7 MFLOP at 503.8 TFLOP/s are 0.07 us
    assert roofline.predict(roofline.sparse_mla(1, 8, "bf16"), 64, None) == {
        "floor_us": 1.331, "predicted_us": 1.331, "bound": "memory", "waves": None
    }  # fmt: skip
    # 4,096 x 65,536 x 32 heads x 256 = 2.199 TFLOP at 1,007.6 TFLOP/s
    full = roofline.predict(roofline.indexer_prefill(4096, 65_536, 32, causal=False), 8192, None)
    assert full["bound"] == "mma" and full["predicted_us"] == full["floor_us"] == 2182.437
    # 9.7687 GB moved; 146 useful GFLOP
    prefill = roofline.predict(roofline.sparse_mla(4096, 8, "bf16"), 4096, None)
    assert prefill == {"floor_us": 289.855, "predicted_us": 5451.264, "bound": "memory", "waves": None}


def test_occupancy_is_in_the_bound() -> None:
    full = roofline.indexer_prefill(4096, 65_536, 32, causal=False)
    # one program of 4 warps: 4 of 752 tensor cores
    held = build.Occupancy(registers=64, shared=40_000, warps=4, spills=False, per_sm=2)
    alone = roofline.predict(full, 1, held)
    assert alone["bound"] in ("mma", "latency") and alone["waves"] == 0.0
    assert alone["predicted_us"] >= 188 * 2182.4
    # 376 programs fill every SM; in flight: 376 x (40,000 + 64 x 4 x 128 threads) = 27.4 MB each 0.8 us
    many = roofline.predict(full, 752, held)
    assert many["waves"] == 2.0 and many["predicted_us"] == 2182.437
    # 8 programs of 10,000 + 32 x 4 x 32 = 14,096 bytes in flight: 2.38 MB take 21.1 times 0.8 us
    few = roofline.predict(
        roofline.sparse_mla(1, 8, "bf16"),
        8,
        build.Occupancy(registers=32, shared=10_000, warps=1, spills=False, per_sm=4),
    )
    assert few["bound"] == "latency" and few["predicted_us"] == pytest.approx(0.8 * 2_384_928 / (8 * 14_096), abs=1e-3)


@pytest.mark.parametrize(
    ("row", "warps"),
    [
        ({"registers": 32, "shared": 0, "warps": 4}, 48),  # 12 blocks: all 48 warps
        ({"registers": 128, "shared": 1_024, "warps": 4}, 16),  # 65,536 / (128 x 128)
        ({"registers": 129, "shared": 1_024, "warps": 4}, 12),  # registers come in 8 a thread
        ({"registers": 32, "shared": 50_176, "warps": 4}, 8),  # 102,400 / (50,176 + 1,024)
        ({"registers": 32, "shared": 50_177, "warps": 4}, 4),
        ({"registers": 32, "shared": 101_376, "warps": 4}, 4),
    ],
)
def test_resident_warps_by_hand(row: dict, warps: int) -> None:
    assert build.resident_warps(row) == warps


def test_every_case_has_a_launch_and_a_prediction() -> None:
    for quick in (True, False):
        works = list(roofline.cases(quick))
        assert {work.kernel for work in works} == set(bench._BY_KERNEL)
        assert len(set(works)) == len(works)
        rows, problems = roofline.predictions(works, compile=False)
        assert not problems and len(rows) == len(works)
        for work, row in zip(works, rows, strict=True):
            assert 0 < row["floor_us"] <= row["predicted_us"] and row["programs"] >= 1, work
        assert len(roofline.table(works, rows).splitlines()) == len(works) + 1
    mla = [work for work in works if work.kernel == "sparse_mla"]
    assert {(w.heads, w.dtype) for w in mla} == {(8, "bf16"), (8, "fp8"), (64, "bf16"), (64, "fp8")}
    assert {None, 0.5, 0.8, 0.9, 0.95} <= {work.keep for work in mla}


def test_occupancy_comes_from_the_cubin() -> None:
    """In a new process: other tests switch the interpreter on, and nothing compiles under it."""
    pytest.importorskip("triton")
    program = (
        "from dataclasses import asdict; from shim.kernels import build, roofline\n"
        "launch = roofline.launch_of(roofline.indexer_paged(1, 65536, 32))\n"
        "found = build.occupancy(launch.build, launch.config, launch.variant)\n"
        "import json; print(json.dumps(asdict(found) | {'programs': launch.programs}))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    from shim.kernels.indexer import tune

    config = tune.paged((12, 0))
    assert found["warps"] == config.warps and not found["spills"]
    assert found["per_sm"] >= config.per_sm and found["programs"] == 188 * config.per_sm
    assert 8192 < found["shared"] <= build.SHARED and 32 < found["registers"] <= 255


def test_the_interpreter_cannot_compile_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows, problems = roofline.predictions([roofline.topk(1, 8192)])
    assert "TRITON_INTERPRET" in problems[0] and rows[0]["occupancy"] is None


@pytest.fixture
def document() -> dict:
    return {
        "schema": bench.SCHEMA, "created": "2026-01-01T00:00:00+00:00",
        "machine": {"card": "A card", "vllm": None, "triton": "3.6.0"},
        "ceilings": {"copy_gb_s": 1000.0, "mma_tflop_s": {"bf16": 400.0, "fp8": None}},
        "model_card": dataclasses.asdict(roofline.RTX_PRO_6000), "records": [], "problems": [],
    }  # fmt: skip


def stub(work: roofline.Work) -> bench.Measured:
    """A card that takes 1 us a token for all our kernels, and 2 us for native ones."""
    if work.kernel == "topk":
        raise RuntimeError("out of memory\nand more lines")
    natives = {"slow": 3.0 * work.tokens, "fast": 2.0 * work.tokens} if work.dtype == "bf16" else {}
    gather = 0.5 * work.tokens if work.kernel == "sparse_mla" else None
    return bench.Measured(float(work.tokens), natives, {"gone": "ImportError: gone"}, 1e-3, "TopKPlan(1)", gather)


def run(document: dict, works: list[roofline.Work]) -> list[int]:
    predictions, _ = roofline.predictions(works, compile=False)
    seen: list[int] = []
    bench.run(works, predictions, document, stub, lambda: seen.append(len(document["records"])))
    return seen


def test_a_run_makes_a_record_of_every_case(document: dict, capsys: pytest.CaptureFixture[str]) -> None:
    works = [
        roofline.sparse_mla(64, 8, "bf16"), roofline.sparse_mla(64, 8, "bf16", 0.9),
        roofline.indexer_paged(8, 65_536, 32), roofline.topk(4, 131_072),
    ]  # fmt: skip
    assert run(document, works) == [1, 2, 3, 4]  # written after each
    mla, shared, paged, topk = document["records"]
    fields = {field.name for field in dataclasses.fields(bench.Record)}
    assert all(set(row) == fields for row in document["records"])
    assert (mla["ours_us"], mla["native_us"], mla["native"], mla["times_native"]) == (64.0, 128.0, "fast", 0.5)
    assert (mla["ceiling"], mla["ceiling_us"], mla["of_ceiling"]) == ("gather", 32.0, 0.5)
    assert shared["keep"] == 0.9 and shared["inputs"] == "keep 0.9" and mla["keep"] is None
    # 64 tokens' rows in 32 us
    assert document["ceilings"]["gather_gb_s"] == {"bf16": round(64 * 2048 * 1152 / 32e3, 1)}
    assert paged["native"] is None and paged["missing"] == {"gone": "ImportError: gone"}
    assert paged["ceiling"] == "copy" and paged["ceiling_us"] == pytest.approx(works[2].bytes / 1e6)
    assert topk["problem"] == "RuntimeError: out of memory" and topk["ours_us"] is None and topk["predicted_us"] > 0
    json.loads(json.dumps(document, allow_nan=False))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and "out of memory" in printed[3] and "128.0 fast, 0.50" in printed[0]


def test_products_are_a_ceiling_too(document: dict) -> None:
    run(document, [roofline.sparse_mla(4096, 64, "bf16")])
    row = document["records"][0]
    # 1,168 GFLOP at 400 TFLOP/s take longer than the 2,048 us of the stub's gather
    assert row["ceiling"] == "mma" and row["ceiling_us"] == pytest.approx(2 * 4096 * 64 * 2048 * 1088 / 400e6)


def test_without_matplotlib_one_line_says_how(
    document: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = tmp_path / "numbers.json"
    bench.write(document, written)
    assert bench.main(["--plot", str(written)]) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and "glm5-shim[bench]" in printed and str(written) in printed
    assert not (tmp_path / "numbers.png").exists()


def test_a_file_that_cannot_be_drawn(
    document: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(document, [roofline.sparse_mla(64, 8, "bf16")])
    lacking = document | {"records": [{k: v for k, v in document["records"][0].items() if k != "ours_us"}]}
    wrong = {
        "absent": None, "empty": "", "cut": json.dumps(document)[:99], "bytes": b"\xff\xfe\xfd", "list": "[]",
        "schema": json.dumps(document | {"schema": 99}), "records": json.dumps(document | {"records": None}),
        "machine": json.dumps(document | {"machine": {}}), "lacking": json.dumps(lacking),
    }  # fmt: skip
    for name, content in wrong.items():
        path = tmp_path / f"{name}.json"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert bench.main(["--plot", str(path)]) == 1
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and str(path) in printed and "expected what" in printed, printed
    assert bench.main(["--plot", str(tmp_path)]) == 1 and "Is a directory" in capsys.readouterr().err
    for option in ("--plot", "--out"):  # the plot would be written over it
        with pytest.raises(SystemExit):
            bench.main([option, str(tmp_path / "numbers.png")])
    monkeypatch.setattr(bench, "plot", lambda document, path: (tmp_path / "no" / "x").touch())
    bench.write(document, tmp_path / "numbers.json")
    capsys.readouterr()
    assert bench.main(["--plot", str(tmp_path / "numbers.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_an_unwritable_file_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "refusal", lambda: None)
    monkeypatch.setattr(roofline, "predictions", lambda *_: pytest.fail("worked first"))
    out = tmp_path / "absent" / "numbers.json"
    assert bench.main(["--quick", "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"glm5-shim: cannot write {out}: No such file or directory; give another path\n"
    monkeypatch.setattr(sys, "argv", ["roofline", "--json", str(tmp_path)])
    with pytest.raises(SystemExit, match="Is a directory"):
        roofline.main()


def test_the_plot_has_a_panel_for_each_kernel(document: dict, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    works = [work for work in roofline.cases(quick=False) if work.kernel != "topk"]
    run(document, works)
    drawn: list = []
    real = figures.Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), real(self, *a, **k)))
        bench.plot(document, tmp_path / "numbers.png")
    assert (tmp_path / "numbers.png").read_bytes().startswith(b"\x89PNG")
    axes = {axis.get_title(): axis for axis in drawn[0].axes}
    assert set(axes) == {
        "indexer_prefill", "indexer_paged",
        *(f"sparse_mla, {heads} heads, {kv}" for heads in (8, 64) for kv in ("bf16", "fp8")),
    }  # fmt: skip
    mla = axes["sparse_mla, 8 heads, bf16"]
    assert (mla.get_xscale(), mla.get_yscale()) == ("log", "log")
    uniform = next(line for line in mla.lines if line.get_label() == "uniform")
    assert list(uniform.get_xdata()) == [1, 8, 64, 512, 4096] == list(uniform.get_ydata())
    dashed = [line for line in mla.lines if line.get_linestyle() == "--"]
    assert any(list(line.get_ydata()) == [2, 16, 128, 1024, 8192] for line in dashed)
    assert not any(line.get_linestyle() == "--" for line in axes["sparse_mla, 8 heads, fp8"].lines)


@pytest.mark.parametrize("kernel", sorted(bench._BY_KERNEL))
def test_a_result_of_an_ops_bench_becomes_a_measurement(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of their `compare` replaces the GPU, and must get this case."""
    work = next(work for work in roofline.cases(quick=False) if work.kernel == kernel)
    folder = "indexer" if kernel.startswith("indexer") else kernel
    module = importlib.import_module(f"shim.kernels.{folder}.bench")
    calls: list = []
    mla = {"ours_us": 4.0, "gather_us": 2.0, "fa3_us": 5.0, "fa3_error": 0.1, "flashmla": "no", "error": 0.01}
    mla["plan"] = "P"
    top = {"ours_us": 4.0, "ours_exact": 1.0, "persistent_topk_us": 5.0, "cooperative_topk": "no"}
    indexer = {"ours_us": 4.0, "native_us": 5.0, "error": 0.01}

    def compare(*arguments: object) -> dict:
        calls.append(arguments)
        return {"sparse_mla": mla, "topk": top}.get(kernel, indexer)

    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (12, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for case in ("PrefillCase", "PagedCase"):
        if kernel.startswith("indexer"):
            monkeypatch.setattr(module, case, lambda *a, case=case: (case, *a))
    if kernel == "topk":
        monkeypatch.setattr(importlib.import_module("shim.kernels.host"), "sm_count", lambda device: 188)
    got = bench.measure(work)
    assert got.ours_us == 4.0 and list(got.natives.values()) == [5.0] and got.configuration
    expected = {
        "sparse_mla": (1, 8, "bf16", None), "topk": (1, 8192, "indexer"),
        "indexer_prefill": (("PrefillCase", 1024, 16_384, 32, True),),
        "indexer_paged": (("PagedCase", 1, 8192, 1, 32),),
    }  # fmt: skip
    assert calls == [expected[kernel]]
    assert got.missing == {"sparse_mla": {"flashmla": "no"}, "topk": {"cooperative_topk": "no"}}.get(kernel, {})
    assert (got.gather_us == 2.0) == (kernel == "sparse_mla")
    if kernel == "topk":
        top["ours_exact"] = 0.75
        with pytest.raises(ValueError, match="75%"):
            bench.measure(work)
    if kernel.startswith("indexer"):
        del indexer["native_us"]
        assert "DeepGEMM" in bench.measure(work).missing["deep_gemm"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--quick"]) == 1
    printed = capsys.readouterr()
    assert "no CUDA GPU" in printed.err and "shim.kernels.roofline" in printed.err and not printed.out


@pytest.mark.parametrize("name", ["indexer", "sparse_mla", "topk"])
def test_without_a_gpu_the_kernels_own_benches_say_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"shim.kernels.{name}.bench").main()
    assert ended.value.code == 1 and "no CUDA GPU" in capsys.readouterr().err


def test_without_torch_both_say_so() -> None:
    for name in ("bench", "roofline"):
        program = (
            "import sys, runpy; sys.modules['torch'] = None\n"
            f"runpy.run_module('shim.kernels.{name}', run_name='__main__')"
        )
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert child.returncode == 1 and len(child.stderr.splitlines()) == 1 and "torch" in child.stderr, child.stderr


def test_a_whole_run_with_everything_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No vLLM, no ceilings, no matplotlib: the file is written, and names what was missing."""
    monkeypatch.setattr(bench, "refusal", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(bench, "ceilings", lambda: ({"copy_gb_s": None, "mma_tflop_s": {"bf16": None}}, ["no ceiling"]))
    monkeypatch.setattr(bench, "machine", lambda: {"card": "A card", "vllm": None, "triton": "3.6.0"})
    monkeypatch.setattr(bench, "measure", stub)
    out = tmp_path / "numbers.json"
    assert bench.main(["--quick", "--only", "indexer_paged", "--no-compile", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["schema"] == 1 and [row["tokens"] for row in found["records"]] == [1, 8]
    assert found["problems"][0].startswith("no native kernels to compare with") and "no ceiling" in found["problems"]
    assert found["records"][0]["ceiling_us"] is None and found["records"][0]["of_ceiling"] is None
    assert found["model_card"]["gb_s"] == 1792
    assert "glm5-shim[bench]" in capsys.readouterr().err
    assert bench.main(["--quick", "--only", "topk", "--no-compile", "--out", str(out)]) == 1  # every case failed
