from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.plan.samples import flat_trace, hop, make_trace, two_hop_trace
from zeropp.tools.plan.catalog import CATALOG, find_hardware
from zeropp.tools.plan.hardware import Hardware
from zeropp.tools.plan.timeline import KINDS, Op, Timeline, simulate
from zeropp.tools.plan.trace import Compute, Event, Gather, Reduce, Trace, TracedHop

A100 = find_hardware("a100-100g")
NO_LATENCY = A100.changed(in_node_latency_us=0.0, link_latency_us=0.0)

hardware = st.builds(
    A100.changed,
    link_gbit_s=st.floats(1, 3200),
    in_node_gbyte_s=st.floats(1, 500),
    compute_share=st.floats(0.01, 1.0),
    link_latency_us=st.floats(0, 100),
    memory_gbyte_s=st.floats(10, 4000),
    overlap=st.booleans(),
    host_ns_per_byte=st.sampled_from([0.0, 0.5]),
    core_wait_us=st.sampled_from([0.0, 500.0]),
)
traces = st.builds(
    replace,
    st.one_of(
        st.builds(flat_trace, units=st.integers(1, 5), micro_batches=st.integers(1, 3)),
        st.builds(
            two_hop_trace, units=st.integers(1, 5), micro_batches=st.integers(1, 3), chunks=st.integers(1, 4)
        ),
    ),
    overlaps=st.booleans(),
)
NO_STREAMS = NO_LATENCY.changed(overlap=False)
"""A machine on which only traces with `overlaps` communicate concurrently with compute."""


def seconds(trace: Trace, machine: Hardware) -> float:
    return simulate(trace, machine).step_seconds


@given(traces, hardware, st.floats(1.0, 10.0))
def test_nothing_faster_makes_a_step_slower(trace: Trace, machine: Hardware, factor: float) -> None:
    before = seconds(trace, machine)
    for name in ("link_gbit_s", "in_node_gbyte_s", "memory_gbyte_s", "peak_tflops"):
        faster = machine.changed(**{name: getattr(machine, name) * factor})
        assert seconds(trace, faster) <= before * (1 + 1e-12)
    sooner = machine.changed(link_latency_us=machine.require("link_latency_us") / factor)
    assert seconds(trace, sooner) <= before


@given(traces, hardware)
def test_a_step_lies_between_its_busiest_resource_and_the_sum(trace: Trace, machine: Hardware) -> None:
    timeline = simulate(trace, machine)
    in_order = simulate(trace, machine.changed(overlap=False))
    busy = timeline.busy_seconds
    lost = sum(op.seconds for op in timeline.ops if op.is_slowdown)
    assert max(busy.values()) <= timeline.step_seconds * (1 + 1e-9)
    assert timeline.step_seconds <= (sum(busy.values()) + lost) * (1 + 1e-9)
    assert sum(timeline.critical_seconds.values()) == pytest.approx(timeline.step_seconds)
    assert sum(timeline.phase_seconds().values()) == pytest.approx(timeline.step_seconds)
    assert set(busy) == set(KINDS)
    assert in_order.busy_seconds == pytest.approx(busy)


@given(traces, hardware)
def test_resources_do_one_thing_at_a_time_and_in_order(trace: Trace, machine: Hardware) -> None:
    reached: dict[str, float] = {}
    for op in simulate(trace, machine).ops:
        for resource in op.resources:
            assert op.start >= reached.get(resource, 0.0)
            reached[resource] = op.end


def test_without_overlap_and_with_one_chunk_a_step_is_the_sum() -> None:
    timeline = simulate(two_hop_trace(chunks=1), A100.changed(overlap=False))
    assert timeline.step_seconds == pytest.approx(sum(timeline.busy_seconds.values()))


def test_chunks_hide_codec_behind_the_wire() -> None:
    slow_codec = A100.changed(overlap=False, memory_gbyte_s=50.0, link_latency_us=0.0, in_node_latency_us=0.0)
    assert seconds(two_hop_trace(chunks=4), slow_codec) < 0.95 * seconds(two_hop_trace(chunks=1), slow_codec)


def test_with_free_links_a_step_is_compute() -> None:
    machine = NO_LATENCY.changed(link_gbit_s=1e12, in_node_gbyte_s=1e12)
    timeline = simulate(flat_trace(), machine)
    assert timeline.step_seconds == pytest.approx(timeline.busy_seconds["compute"], rel=1e-6)
    assert timeline.bottleneck == "compute"


def test_with_free_compute_a_step_is_the_link() -> None:
    machine = replace(NO_LATENCY, peak_tflops=1e12, memory_gbyte_s=1e12)
    timeline = simulate(flat_trace(), machine)
    assert timeline.step_seconds == pytest.approx(timeline.busy_seconds["across link"], rel=1e-6)
    assert timeline.bottleneck == "across link"


def test_only_the_first_gather_and_the_last_reduction_are_exposed_when_compute_is_longer() -> None:
    """Gathers of plain FSDP2 are a bit shorter than compute, so all but the ends are hidden."""
    trace = flat_trace(units=6)
    machine = NO_LATENCY.changed(link_gbit_s=1000.0)
    timeline = simulate(trace, machine)
    one = timeline.busy_seconds["across link"] / sum(not isinstance(e, Compute) for e in trace.events)
    exposed = timeline.step_seconds - timeline.busy_seconds["compute"]
    assert one < trace.flops / 18 / 312e12 / machine.compute_share
    assert exposed == pytest.approx(2 * one)


def test_a_reduction_waits_for_the_one_before_and_delays_compute() -> None:
    """Two units have long reductions, so compute of the third waits for the first reduction."""
    machine = NO_LATENCY.changed(in_node_gbyte_s=1e9)
    long = (hop("flat", "reduce_scatter", 1 << 30),)
    events: list[Event] = []
    for name in ("c", "b", "a"):
        events += [Compute(name, "backward", 10**12, 0), Reduce(name, long)]
    timeline = simulate(replace(flat_trace(), events=tuple(events)), machine)
    ends = {op.name: op for op in timeline.ops if op.kind != "wait"}
    assert ends["backward a"].start == pytest.approx(ends["flat reduce c, chunk 1/1"].end)
    assert ends["backward b"].start == pytest.approx(ends["backward c"].end)


def _reductions(*hops: TracedHop) -> dict[str, Op]:
    """Return the operations of a backward of three units with communication threads."""
    events: list[Event] = []
    for name in ("c", "b", "a"):
        events += [Compute(name, "backward", 10**12, 0), Reduce(name, hops)]
    timeline = simulate(replace(flat_trace(), events=tuple(events), overlaps=True), NO_STREAMS)
    return {op.name: op for op in timeline.ops if op.kind != "wait" and not op.is_slowdown}


def test_with_communication_threads_compute_waits_until_gradients_are_encoded() -> None:
    ops = _reductions(hop("across", "all_to_all", 1 << 30, coded=1 << 28, codec="int4"))
    assert ops["backward a"].start < ops["across reduce c, chunk 1/1"].end
    assert ops["backward a"].start >= ops["encode reduce c, chunk 1/1"].end
    # Two reductions are concurrent: the next one is encoded meanwhile, and its hop follows immediately.
    assert ops["encode reduce b, chunk 1/1"].end < ops["across reduce c, chunk 1/1"].end
    assert ops["across reduce b, chunk 1/1"].start == ops["across reduce c, chunk 1/1"].end
    assert ops["encode reduce a, chunk 1/1"].start >= ops["decode reduce c, chunk 1/1"].end


def test_with_communication_threads_compute_waits_for_the_end_of_a_ring() -> None:
    ops = _reductions(hop("flat", "reduce_scatter", 1 << 30))
    assert ops["backward a"].start == pytest.approx(ops["flat reduce c, chunk 1/1"].end)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_only_communication_threads_wait_for_a_core_after_each_hop(streams: bool, overlaps: bool) -> None:
    trace = replace(two_hop_trace(units=1, chunks=1), overlaps=overlaps)
    machine = NO_LATENCY.changed(overlap=streams)
    longer = seconds(trace, machine.changed(core_wait_us=1e6)) - seconds(trace, machine)
    hops = sum(len(event.hops) for event in trace.events if not isinstance(event, Compute))
    assert longer == pytest.approx(hops if overlaps and not streams else 0.0, abs=0.01)


def test_forward_keeps_two_gathers_in_flight() -> None:
    """The third gather waits for the copy-out of the first, at the start of its compute."""
    gather = (hop("flat", "all_gather", 1 << 10),)
    events: list[Event] = []
    for name in ("a", "b", "c", "d"):
        events += [Gather(name, gather), Compute(name, "forward", 10**12, 0)]
    timeline = simulate(replace(flat_trace(), events=tuple(events)), NO_LATENCY)
    ops = {op.name: op for op in timeline.ops if op.kind != "wait"}
    assert ops["flat gather d, chunk 1/1"].start == pytest.approx(ops["forward b"].start)


def test_gathers_of_a_micro_batch_wait_for_the_one_before() -> None:
    timeline = simulate(flat_trace(micro_batches=2), A100)
    ops = list(timeline.ops)
    backward = [op.phase for op in ops].index("backward")
    rest = range(backward, len(ops))
    again = next(i for i in rest if ops[i].phase == "forward" and ops[i].kind == "across link")
    assert ops[again].start == pytest.approx(max(op.end for op in ops[:again]))


def test_only_the_end_waits_for_the_all_reduce_of_hsdp() -> None:
    scatter, replicas = hop("in-node", "reduce_scatter", 1 << 20), hop("across", "all_reduce", 1 << 28)
    gather = (hop("in-node", "all_gather", 1 << 20),)
    trace = make_trace(4, 10**12, 1, first=gather, again=gather, reduce=(scatter, replicas))
    timeline = simulate(trace, A100)
    backward = max(op.end for op in timeline.ops if op.name.startswith("backward"))
    alone = simulate(make_trace(4, 10**12, 1, gather, gather, (scatter,)), A100)
    assert backward == pytest.approx(max(op.end for op in alone.ops if op.name.startswith("backward")))
    assert timeline.step_seconds > 2 * alone.step_seconds


def test_codec_kernels_take_time_from_compute() -> None:
    """Links are free, so a step is the sum of compute and codec, not the longer of the two."""
    machine = NO_LATENCY.changed(link_gbit_s=1e12, in_node_gbyte_s=1e12)
    busy = (timeline := simulate(two_hop_trace(), machine)).busy_seconds
    assert timeline.step_seconds > busy["compute"] + 0.7 * busy["codec"] > 1.01 * busy["compute"]


def test_throughput_is_tokens_and_flops_over_time() -> None:
    timeline = simulate(flat_trace(), CATALOG["h100-8x400g"])
    assert timeline.tokens_per_second == pytest.approx(2048 * 32 / timeline.step_seconds)
    assert timeline.tflops == pytest.approx(1.2 / timeline.step_seconds)


def test_an_empty_step_takes_no_time() -> None:
    timeline: Timeline = simulate(replace(flat_trace(), events=()), A100)
    assert timeline.step_seconds == 0.0
    assert set(timeline.critical_seconds.values()) == {0.0}
