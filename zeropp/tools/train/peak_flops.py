"""Peak FLOP/s of known devices, for the model FLOPs utilisation."""

from __future__ import annotations

import torch

KNOWN_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "V100": 125.0,
}
"""TFLOP/s of dense 16-bit matrix products, from NVIDIA's data sheets, by a part of the device's name."""


def peak_flops(given_tflops: float, device: torch.device) -> tuple[float | None, str]:
    """Return the FLOP/s of one device, or None, and a sentence with their source.

    >>> peak_flops(2.0, torch.device("cpu"))
    (2000000000000.0, 'model FLOPs utilisation is relative to 2 TFLOP/s per device (given)')
    >>> peak_flops(0.0, torch.device("cpu"))[0]
    """
    if given_tflops:
        return given_tflops * 1e12, _sentence(given_tflops, "given")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    for part, tflops in KNOWN_TFLOPS.items():
        if part in name:
            return tflops * 1e12, _sentence(tflops, f"{name}, 16-bit")
    return None, (
        f"model FLOPs utilisation is left out: the peak of {name} is not known; set --logging.peak-tflops"
    )


def _sentence(tflops: float, source: str) -> str:
    return f"model FLOPs utilisation is relative to {tflops:g} TFLOP/s per device ({source})"
