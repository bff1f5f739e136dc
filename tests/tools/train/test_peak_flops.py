"""Peaks of devices; with the doctests in the file."""

from __future__ import annotations

import torch

from zeropp.tools.train.peak_flops import peak_flops


def test_an_unknown_peak_is_said_and_not_guessed() -> None:
    flops, sentence = peak_flops(0.0, torch.device("cpu"))
    assert flops is None
    assert sentence.startswith("model FLOPs utilisation is left out")
