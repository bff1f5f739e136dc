"""Tests mirror sources: zeropp/a/b.py is tested in tests/a/test_b.py, or where it is said here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "bench/messages": "bench/test_ranks",  # sent to real rank processes, and back
    "bench/rank_process": "bench/test_ranks",
    "comm/layout": "comm/test_reduce_scatter",  # chunks and codecs of every Config and world
    "comm/wire": "comm/test_all_gather",  # hops, and what they count
    "applying": "test_handle",  # what apply returns, and refuses
    "file_lock": "quant/test_cpu",  # kernels that two processes compile
    "fsdp_post_backward": "test_unused",  # parameters with and without gradients
    "kept": "test_accumulation",  # against the memory that is there
    "process_exit": "test_ranks",  # ranks that a signal ends
    "plan/catalog": "plan/test_hardware",
    "plan/result": "report/test_plan",
    "plan/step_recorder": "plan/test_fake_step",
    "quant/cpu_blocks": "quant/test_conformance",  # all kernels against reference.py, bit for bit
    "quant/cpu_cache": "quant/test_cpu",
    "quant/cpu_intrinsics": "quant/test_conformance",
    "quant/cpu_kernels": "quant/test_conformance",
    "quant/cpu_lanes": "quant/test_conformance",
    "quant/dry": "plan/test_dry_run",
    "quant/formats": "quant/test_reference",
    "quant/gpu": "quant/test_gpu_interpreter",  # test_conformance in Triton's interpreter
    "quant/gpu_kernels": "quant/test_gpu_interpreter",
    "quant/gpu_numbers": "quant/test_gpu_interpreter",
    "quant/gpu_rotation": "quant/test_gpu_interpreter",
    "train/run_events": "train/test_loop",
    "zero_grad": "test_gradients",
}


def test_every_source_has_a_test_file() -> None:
    sources = {path.relative_to(ROOT / "zeropp").with_suffix("") for path in (ROOT / "zeropp").rglob("*.py")}
    named = {source for source in sources if not source.name.startswith("__")}
    untested = {
        str(source)
        for source in named
        if not (ROOT / "tests" / source.with_name(f"test_{source.name}.py")).exists()
    }
    assert untested == set(ELSEWHERE), "give each a test file of its name, or say here where its tests are"
    assert [test for test in ELSEWHERE.values() if not (ROOT / "tests" / f"{test}.py").exists()] == []
