"""launch.py, unchanged, on devices whose kernels the interpreter runs, against reference.py, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's own interpreter compiles nothing", allow_module_level=True)

from tests.quant.test_conformance import assert_same_bits
from zeropp.quant import reference
from zeropp.quant.formats import BlockFormat
from zeropp.quant.gpu import launch
from zeropp.quant.gpu.kernels import decode_kernel
from zeropp.quant.rotation import LARGEST_FP32

from .cases import Case, covering_cases, make_case, run_case
from .driver import MAX_GRID, TARGETS, PtxDriver, ptx_devices
from .errors import BadAccessError

INT8, INT4 = BlockFormat(8, 128), BlockFormat(4, 128)
CASES = covering_cases([make_case(seed, TARGETS[seed % 3]) for seed in range(1000)])


@pytest.fixture(scope="module")
def devices() -> Iterator[PtxDriver]:
    with ptx_devices(*TARGETS) as driver:
        yield driver


@pytest.fixture(autouse=True)
def first_device(devices: PtxDriver) -> None:
    devices.current_device, devices.only_last = 0, None
    devices.runs.clear()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}-{case.target}-{case.seed}")
def test_every_value_of_every_axis(case: Case, devices: PtxDriver) -> None:
    """`python -m tests.ptx` runs as many cases as you like; these were chosen of its first thousand."""
    run_case(case, devices)
    assert [run.device for run in devices.runs] == [devices.current_device]


def encode(source: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
    """Encode in int8 by launch.py, and check the bytes."""
    expected = torch.zeros(out.shape, dtype=torch.uint8)
    reference.encode(INT8, source, expected, **options)  # type: ignore[arg-type]
    launch.encode(INT8, source, out, **options)  # type: ignore[arg-type]
    assert_same_bits(out.contiguous(), expected)
    return out


def encoded_rows(rows: int, numel: int) -> torch.Tensor:
    return torch.zeros(rows, INT8.row_bytes(numel), dtype=torch.uint8)


# What Triton specializes, and what it does not.


def test_kernels_of_aligned_and_odd_rows(devices: PtxDriver) -> None:
    """Rows that start at multiples of 16 bytes are loaded in vectors, others number by number."""
    for numel, gap in ((256, 0), (256, 1), (255, 1)):
        source = torch.randn(2, numel + gap).bfloat16()[:, :numel]
        encode(source, encoded_rows(2, numel))
    wide, odd_stride, odd_length = (run.ptx for run in devices.runs)
    assert "ld.global.v4.b32" in wide
    assert "ld.global.v4.b32" not in odd_stride
    assert "ld.global.v4.b32" not in odd_length
    assert len({run.kernel for run in devices.runs}) == 3


def test_seeds_and_offsets_do_not_compile_again(devices: PtxDriver) -> None:
    fmt = BlockFormat(8, 128, stochastic=True)
    source, out = torch.randn(1, 128), encoded_rows(1, 128)
    for seed, offset in ((0, 0), (1, 1), (2**64 - 1, 16), (3, 2**40 + 1)):
        expected = torch.zeros_like(out)
        reference.encode(fmt, source, expected, seed=seed, offset=offset)
        launch.encode(fmt, source, out, seed=seed, offset=offset)
        assert_same_bits(out, expected)
    assert len({run.kernel for run in devices.runs}) == 1


def test_rows_of_one_element_and_of_stride_one() -> None:
    """Triton makes arguments that are 1 constants."""
    encode(torch.randn(3, 1), encoded_rows(3, 1))
    encode(torch.randn(130).as_strided((1, 130), (1, 1)), encoded_rows(1, 130))


# Grids and offsets that no test of values reaches.


def test_most_rows_of_a_grid(devices: PtxDriver) -> None:
    """CUDA launches at most 65,535 programs in y, where rows are."""
    most = MAX_GRID[1]
    devices.only_last = 2
    source = torch.randn(most, 1)
    launch.encode(INT8, source, out := encoded_rows(most, 1))
    expected = encoded_rows(2, 1)
    reference.encode(INT8, source[-2:], expected)
    assert_same_bits(out[-2:].contiguous(), expected)
    with pytest.raises(ValueError, match="65536 rows; a launch takes at most 65535"):
        launch.encode(INT8, torch.zeros(most + 1, 1), encoded_rows(most + 1, 1))
    with pytest.raises(ValueError, match="65536 rows"):
        launch.decode(INT8, encoded_rows(most + 1, 1), torch.zeros(most + 1, 1))


def test_rows_beyond_4_gib() -> None:
    """Memory that nobody touches costs nothing."""
    stride = 2**30 + 16  # of fp32
    flat = torch.empty(stride + 300)
    source = flat.as_strided((2, 300), (stride, 1))
    source.copy_(torch.randn(2, 300))
    far = torch.empty(2**32 + 1024, dtype=torch.uint8)
    row_bytes = INT8.row_bytes(300)
    out = encode(source, far.as_strided((2, row_bytes), (2**32 + 16, 1)))
    decoded, expected = torch.empty(stride + 300).as_strided((2, 300), (stride, 1)), torch.empty(2, 300)
    launch.decode(INT8, out, decoded)
    reference.decode(INT8, out.contiguous(), expected)
    assert_same_bits(decoded.contiguous(), expected)


def test_tiles_beyond_4_gib(devices: PtxDriver) -> None:
    """The last tile of a row of 2^31 bf16 numbers; its scales are in the last bytes of the encoded row."""
    numel, tile = 2**31 + 3 * 4096, 4096
    source, out = (
        torch.empty(1, numel, dtype=torch.bfloat16),
        torch.empty(1, INT8.row_bytes(numel), dtype=torch.uint8),
    )
    last = source[:, -tile:].copy_(torch.randn(1, tile))
    devices.only_last = 1
    launch.encode(INT8, source, out)
    expected = encoded_rows(1, tile)
    reference.encode(INT8, last, expected)
    payload, scales = INT8.payload_bytes(numel), 2 * tile // INT8.block_size
    assert_same_bits(out[0, payload - tile : payload], expected[0, :tile])
    assert_same_bits(
        out[0, payload + INT8.blocks(numel) * 2 - scales :][:scales], expected[0, tile:][:scales]
    )
    decoded = torch.empty(1, numel, dtype=torch.bfloat16)
    launch.decode(INT8, out, decoded)
    reference.decode(INT8, expected, back := torch.empty(1, tile, dtype=torch.bfloat16))
    assert_same_bits(decoded[:, -tile:].contiguous(), back)


# Devices and streams.


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU, number `gpu`. Its memory is the host's."""

    gpu: int
    is_cuda = property(lambda self: True)

    def get_device(self) -> int:
        return self.gpu


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    moved: OnDevice = tensor.as_subclass(OnDevice)
    moved.gpu = index
    return moved


def test_a_tensor_of_a_device_that_is_not_current(
    devices: PtxDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch goes to the tensor's device, and the thread's device is the same afterwards."""

    def exchange(index: int) -> int:
        before = devices.current_device
        if index >= 0:
            devices.current_device = index
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(devices, "get_current_stream", lambda device: 100 + device)
    source, out = on_device(torch.randn(1, 200), 1), on_device(encoded_rows(1, 200), 1)
    launch.encode(INT8, source, out)
    launch.recode(
        INT8,
        out.unsqueeze(0),
        INT4,
        on_device(torch.zeros(1, INT4.row_bytes(200), dtype=torch.uint8), 2),
        200,
    )
    assert [(run.device, run.stream) for run in devices.runs] == [(1, 101), (2, 102)]
    assert devices.current_device == 0


def test_the_stream_of_the_calling_thread(devices: PtxDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = threading.local()
    monkeypatch.setattr(devices, "get_current_stream", lambda device: getattr(streams, "current", 0))

    def work() -> None:
        streams.current = 7
        encode(torch.randn(1, 200), encoded_rows(1, 200))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    encode(torch.randn(1, 200), encoded_rows(1, 200))
    assert [run.stream for run in devices.runs] == [7, 0]


def test_an_access_beyond_a_tensor_is_seen() -> None:
    """Test the whole way with a row that is shorter than the launch declares."""
    source, out = torch.randn(2, 128), encoded_rows(2, 128)
    launch.encode(INT8, source, out)
    row = out[:1].expand(2, -1)  # of the second row, only the first one's bytes are there
    decoded = torch.zeros(2, 128)
    launch.decode(INT8, row, decoded)
    with pytest.raises(BadAccessError, match="not all in one tensor"):
        decode_kernel[1, 2](
            out[:1], decoded, None, 128, 0, 144, 128, 1.0, senders=1, bits=8, block_size=128, rotated=False,
            largest=LARGEST_FP32, accumulate=False, **launch.LAUNCH,
        )  # fmt: skip


def test_ranks_share_a_cache_folder(tmp_path: Path) -> None:
    """Two processes compile the same kernels into one empty folder at the same time; both are right."""
    command = [sys.executable, "-m", "tests.ptx", "--cases", "2", "--seed", "3", "--targets", "sm_90"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [rank.communicate()[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert len(list(tmp_path.glob("*/*.ptx"))) == 2
    assert list(tmp_path.glob("*/tmp.*/*")) == []
