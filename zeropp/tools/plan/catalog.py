"""Hardware by name: numbers of GPU clusters from data sheets, and measured numbers of one lab cluster.

[Note: Numbers that are not on a data sheet]
Latencies are those of NCCL's cost model (src/graph/tuning.cc, ring, simple protocol): 3.4 us per step over
NVLink, 5.7 us over PCIe, 14 us over the network. TCP over Ethernet is assumed to take 30 us.
The achievable share of the peak is the only fitted number. It holds for all GPUs here: 0.50 has the smallest
median error over the ZeRO++ paper's table on V100 (benchmarks/paper_cells.py, communication in order).
Codec kernels are assumed to run at the rate of the memory. zeropp's kernels were never measured on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .hardware import CodecSpeed, Hardware

FITTED_SHARE = 0.50
TCP_LATENCY_US = 30.0

_DGX2 = Hardware(
    name="v100-dgx2-100g",
    source="NVIDIA DGX-2 and V100 data sheets: 125 TFLOPS tensor, 32 GB, 900 GB/s, NVLink 300 GB/s both ways",
    ranks_per_node=16,
    peak_tflops=125.0,
    compute_share=FITTED_SHARE,
    memory_gib=32.0,
    memory_gbyte_s=900.0,
    in_node_gbyte_s=150.0,
    in_node_latency_us=3.4,
    link_gbit_s=100.0,
    link_latency_us=14.0,
)
_A100 = Hardware(
    name="a100-100g",
    source="NVIDIA A100 80GB SXM data sheet: 312 TFLOPS BF16, 80 GB, 2,039 GB/s, NVLink 600 GB/s both ways",
    ranks_per_node=8,
    peak_tflops=312.0,
    compute_share=FITTED_SHARE,
    memory_gib=80.0,
    memory_gbyte_s=2039.0,
    in_node_gbyte_s=300.0,
    in_node_latency_us=3.4,
    link_gbit_s=100.0,
    link_latency_us=14.0,
)
_H100 = Hardware(
    name="h100-8x400g",
    source="NVIDIA DGX H100 data sheet: 989 TFLOPS BF16 dense, 80 GB, 3,350 GB/s, NVLink 900 GB/s both ways, "
    "8 x 400 Gb/s",
    ranks_per_node=8,
    peak_tflops=989.0,
    compute_share=FITTED_SHARE,
    memory_gib=80.0,
    memory_gbyte_s=3350.0,
    in_node_gbyte_s=450.0,
    in_node_latency_us=3.4,
    link_gbit_s=3200.0,
    link_latency_us=14.0,
)
_ETHERNET = replace(
    _A100,
    name="a100-pcie-10gbe",
    source="NVIDIA A100 80GB PCIe data sheet: 312 TFLOPS BF16, 80 GB, 1,935 GB/s, PCIe 64 GB/s both ways; "
    "Ethernet at line rate",
    memory_gbyte_s=1935.0,
    in_node_gbyte_s=32.0,
    in_node_latency_us=5.7,
    link_gbit_s=10.0,
    link_latency_us=TCP_LATENCY_US,
)

_LAB = Hardware(
    name="lab-1gbit",
    source="measured, as `zeropp doctor` does, on 2 x 2 ranks of `zeropp lab`, on a 2-core AVX-512 Xeon VM; "
    "the rate of the link is what was given to the lab",
    ranks_per_node=2,
    peak_tflops=0.075,
    compute_share=1.0,
    memory_gib=10.0,
    memory_gbyte_s=5.7,
    in_node_gbyte_s=0.78,
    in_node_latency_us=1100.0,
    link_gbit_s=1.0,
    link_latency_us=0.0,
    overlap=False,
    host_ns_per_byte=6.6,
    codecs={
        "none": CodecSpeed(1590, 1480),
        "bf16": CodecSpeed(1920, 1960),
        "int8": CodecSpeed(2110, 1550),
        "int4": CodecSpeed(3320, 3810),
    },
)


def _with_links(base: Hardware, name: str, rates: tuple[int, ...]) -> list[Hardware]:
    return [replace(base, name=name.format(rate), link_gbit_s=float(rate)) for rate in rates]


CATALOG: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        *_with_links(_DGX2, "v100-dgx2-{}g", (100, 200, 400, 800)),
        *_with_links(_A100, "a100-{}g", (100, 200, 400)),
        _H100,
        *_with_links(_ETHERNET, "a100-pcie-{}gbe", (10, 25, 100)),
        _LAB,
    )
}


def find_hardware(name: str) -> Hardware:
    """Return the hardware with this name, or from the file with this path.

    >>> find_hardware("a100-200g").peak_tflops
    312.0
    """
    if name in CATALOG:
        return CATALOG[name]
    if Path(name).suffix in (".json", ".toml"):
        if not Path(name).is_file():
            raise ValueError(f"hardware is {name!r}, and there is no such file")
        return Hardware.load(Path(name))
    raise ValueError(
        f"hardware is {name!r}; expected one of {', '.join(CATALOG)}, or a .json or .toml file, such as one "
        "from `zeropp doctor`; --peak-tflops, --link-gbit-s and so on change single numbers"
    )
