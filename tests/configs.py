"""The Configs that everything must hold for: presets, and every option beyond them. Two ranks a node."""

from __future__ import annotations

import zeropp

CONFIGS: dict[str, zeropp.Config] = {
    "default": zeropp.Config(node_size=2),
    "paper": zeropp.Config.paper(node_size=2),
    "four_bit": zeropp.Config.four_bit(node_size=2),
    "delta": zeropp.Config(weights="delta-int4", delta_in_node="bf16", refresh_every=2, node_size=2),
    "rotated": zeropp.Config(rotate=True, node_size=2),
    "half rotated": zeropp.Config(rotate=True, gradients_in_node="bf16", node_size=2),
    "stochastic": zeropp.Config(rounding="stochastic", node_size=2),
    "feedback": zeropp.Config(error_feedback=True, rounding="stochastic", node_size=2),
}
