"""What everything must hold for: presets and every option beyond them, and shapes of a unit."""

from __future__ import annotations

from hypothesis import strategies as st

import zeropp

# Two ranks a node.
CONFIGS: dict[str, zeropp.Config] = {
    "default": zeropp.Config(node_size=2),
    "paper": zeropp.Config.paper(node_size=2),
    "four_bit": zeropp.Config.four_bit(node_size=2),
    "delta": zeropp.Config(weights="delta-int4", delta_in_node="bf16", refresh_every=2, node_size=2),
    "unrotated": zeropp.Config(rotate=False, node_size=2),
    "half rotated": zeropp.Config(gradients_in_node="bf16", node_size=2),
    "stochastic": zeropp.Config(rounding="stochastic", node_size=2),
    "feedback": zeropp.Config(error_feedback=True, rounding="stochastic", node_size=2),
}

# Elements of each parameter in a shard: below and above a block, and what it takes to get blocks of its own.
PARAMETERS = st.lists(
    st.sampled_from([1, 2, 31, 127, 128, 129, 1009, 2049]) | st.integers(1, 600), min_size=1, max_size=3
).map(tuple)
