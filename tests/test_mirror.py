"""Tests mirror sources: zeropp/a/b.py is tested in tests/a/test_b.py, or where it is said here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "tools/bench/messages": "tools/bench/test_ranks",  # sent to real rank processes, and back
    "tools/bench/rank_process": "tools/bench/test_ranks",
    "cpu/late_gradients": "cpu/test_overlap",
    "cpu/prefetch": "cpu/test_overlap",
    "_describe": "test_handle",  # notes and the table of summary()
    "comm/layout": "comm/test_reduce_scatter",  # chunks and codecs of every Config and world
    "comm/wire": "comm/test_all_gather",  # hops, and what they count
    "_apply": "test_handle",  # what apply returns, and refuses
    "_file_lock": "quant/cpu/test_launch",  # kernels that two processes compile
    "fsdp2/gradients": "fsdp2/test_units",
    "fsdp2/post_backward": "test_unused",  # parameters with and without gradients
    "_footprint": "test_accumulation",  # against the memory that is there
    "tools/process_exit": "test_ranks",  # ranks that a signal ends
    "tools/plan/catalog": "tools/plan/test_hardware",
    "tools/plan/result": "tools/report/test_plan",
    "tools/plan/step_recorder": "tools/plan/test_fake_step",
    "quant/cast": "quant/test_codec",
    "quant/checks": "quant/test_conformance",
    "quant/cpu/cache": "quant/cpu/test_launch",
    "quant/cpu/kernels": "quant/test_conformance",  # all kernels against reference.py, bit for bit
    "quant/cpu/simd": "quant/test_conformance",
    "quant/noop": "tools/plan/test_dry_run",
    "quant/formats": "quant/test_reference",
    "quant/gpu/launch": "quant/test_gpu_interpreter",  # test_conformance in Triton's interpreter
    "quant/gpu/kernels": "quant/test_gpu_interpreter",
    "quant/gpu/bits": "quant/test_gpu_interpreter",
    "quant/gpu/rotation": "quant/test_gpu_interpreter",
    "tools/train/run_events": "tools/train/test_loop",
    "fsdp2/zero_grad": "test_gradients",
}


def test_every_source_has_a_test_file() -> None:
    sources = {path.relative_to(ROOT / "zeropp").with_suffix("") for path in (ROOT / "zeropp").rglob("*.py")}
    named = {source for source in sources if not source.name.startswith("__")}
    untested = {
        str(source)
        for source in named
        if not (ROOT / "tests" / source.with_name(f"test_{source.name.lstrip('_')}.py")).exists()
    }
    assert untested == set(ELSEWHERE), "give each a test file of its name, or say here where its tests are"
    assert [test for test in ELSEWHERE.values() if not (ROOT / "tests" / f"{test}.py").exists()] == []
