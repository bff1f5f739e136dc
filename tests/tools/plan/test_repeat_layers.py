from __future__ import annotations

import pytest

from zeropp.tools.plan.memory_estimate import MemoryEstimate
from zeropp.tools.plan.repeat_layers import StepPart, extrapolate_memory, repeat_events
from zeropp.tools.plan.trace import Compute, Event, Gather, Phase, Reduce


def _memory(shards: int, activations: int) -> MemoryEstimate:
    return MemoryEstimate(shards, 0, 0, 0, 0, 0, activations)


def _model(layers: int) -> StepPart:
    """Return one micro-batch as FSDP2 runs it. Memory is 10 per layer, and 3 per layer after its forward."""
    events: list[tuple[Event, int]] = [(Gather("(root)", ()), 0)]

    def compute(layer: int, phase: Phase) -> Event:
        return Compute(f"net.layers.{layer}", phase, flops=1, bytes_touched=2)

    def gather(layer: int) -> Event:
        return Gather(f"net.layers.{layer}", ())

    for layer in range(layers):
        events += [(gather(layer), layer), (compute(layer, "forward"), layer + 1)]
    events += [(Compute("(root)", "forward", 5, 5), layers), (gather(layers - 1), layers)]
    for layer in reversed(range(layers)):
        if layer:
            events.append((gather(layer - 1), layer + 1))
        events += [(compute(layer, "backward"), layer + 1), (Reduce(f"net.layers.{layer}", ()), layer)]
    events.append((Reduce("(root)", ()), 0))
    return [(event, _memory(10 * layers, 3 * done)) for event, done in events]


@pytest.mark.parametrize("missing", [1, 2, 9])
def test_a_few_layers_become_all(missing: int) -> None:
    assert repeat_events(_model(4), "net.layers", missing) == [event for event, _ in _model(4 + missing)]


@pytest.mark.parametrize("missing", [1, 2, 9])
def test_memory_at_its_largest_is_that_of_all(missing: int) -> None:
    memory = extrapolate_memory(_model(4), _model(5), "net.layers", missing)
    expected = max((memory for _, memory in _model(4 + missing)), key=lambda moment: moment.peak)
    assert max(memory, key=lambda moment: moment.peak) == expected
