"""Peaks of devices. Doctests in the source cover the rest."""

from __future__ import annotations

import torch

from zeropp.tools.train.peak_flops import peak_flops


def test_an_unknown_peak_is_left_out() -> None:
    flops, sentence = peak_flops(0.0, torch.device("cpu"))
    assert flops is None
    assert sentence.startswith("model FLOPs utilisation is left out")
