from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.plan.samples import NODES, RANKS, hop
from zeropp.tools.plan.catalog import CATALOG, find_hardware
from zeropp.tools.plan.hardware import CodecSpeed, Cost, Hardware
from zeropp.tools.plan.trace import Compute

A100 = find_hardware("a100-100g")


def test_every_name_is_found_and_has_a_source() -> None:
    for name, hardware in CATALOG.items():
        assert find_hardware(name) is hardware
        assert hardware.name == name
        assert ("zeropp doctor" if name.startswith("lab-") else "data sheet") in hardware.source


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"hardware is 'v1000'.*v100-dgx2-100g.*h100-8x400g.*zeropp doctor"):
        find_hardware("v1000")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"'lab.json', and there is no such file"):
        find_hardware("lab.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_share": 1.5}, "compute_share is 1.5"),
        ({"link_gbit_s": 0.0}, "link_gbit_s is 0.0"),
        ({"link_latency_us": -1.0}, "link_latency_us is -1.0; expected zero or a positive number"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
    ],
)
def test_invalid_numbers_are_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A100.changed(**changes)


def measured() -> Hardware:
    return replace(
        A100,
        codecs={"int8": CodecSpeed(1000.0, 2000.0)},
        measured={"all_gather across": Cost(100.0, 10.0), "all_gather in-node": Cost(10.0, 1.0)},
    )


def test_json_keeps_everything(tmp_path: Path) -> None:
    measured().save(tmp_path / "lab.json")
    assert find_hardware(str(tmp_path / "lab.json")) == measured()


def test_toml_with_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nsource = "me"\nranks_per_node = 8\npeak_tflops = 312\ncompute_share = 0.4\n'
        "memory_gib = 80\nmemory_gbyte_s = 2039\nin_node_gbyte_s = 300\nin_node_latency_us = 3.4\n"
        "link_gbit_s = 50\nlink_latency_us = 14\n[codecs.int8]\nencode_m_s = 1.0\ndecode_m_s = 2.0\n"
    )
    assert find_hardware(str(path)).codecs == {"int8": CodecSpeed(1.0, 2.0)}


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"name": "x", "colour": "red"}'])
def test_other_files_raise_an_error_with_the_expected_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad.json is not a hardware file .*peak_tflops"):
        find_hardware(str(path))


def test_compute_is_products_and_memory() -> None:
    work = Compute("x", "forward", flops=312 * 10**9, bytes_touched=2_039_000)
    assert A100.changed(compute_share=0.5).compute_seconds(work) == pytest.approx(2e-3 + 1e-6)


def test_ranks_of_a_node_share_its_link() -> None:
    machine = A100.changed(link_latency_us=0.0)
    _, across = machine.hop_seconds(hop("across", "all_to_all", 10**9), NODES, RANKS)
    assert across == pytest.approx(RANKS * 8 / 100)


def test_a_flat_ring_uses_both_links_and_has_every_latency() -> None:
    machine = A100.changed(in_node_latency_us=1.0, link_latency_us=10.0)
    in_node, across = machine.hop_seconds(hop("flat", "all_gather", 8 * 10**9), NODES, RANKS)
    latency = (NODES * 10 + (NODES * RANKS - 1 - NODES)) * 1e-6
    assert across == pytest.approx(8 * 8 / 100 + latency)
    assert in_node == pytest.approx(8 / 300 + latency)


def test_chunks_divide_bytes_and_repeat_latency() -> None:
    machine = A100.changed(in_node_latency_us=1000.0)
    whole, _ = machine.hop_seconds(hop("in-node", "all_to_all", 3 * 10**8), NODES, RANKS)
    part, _ = machine.hop_seconds(hop("in-node", "all_to_all", 3 * 10**8, chunks=4), NODES, RANKS)
    assert [whole, part] == pytest.approx([2e-3, 1.25e-3])


def test_measured_costs_replace_rates() -> None:
    across, in_node = hop("across", "all_gather", 10**6), hop("in-node", "all_gather", 10**6)
    assert sum(measured().hop_seconds(across, NODES, RANKS)) == pytest.approx(0.0101)
    assert sum(measured().hop_seconds(in_node, NODES, RANKS)) == pytest.approx(0.00101)


def test_another_link_drops_costs_of_the_old_one() -> None:
    assert set(measured().changed(link_gbit_s=25.0).measured) == {"all_gather in-node"}
    assert set(measured().changed(in_node_gbyte_s=25.0).measured) == {"all_gather across"}
    assert measured().changed(compute_share=0.3).measured == measured().measured


def test_codecs_run_at_their_measured_speed_or_at_the_rate_of_the_memory() -> None:
    assert measured().encode_seconds("int8", 1e9) == pytest.approx(1.0)
    assert measured().decode_seconds("int8", 1e9) == pytest.approx(0.5)
    assert measured().decode_seconds("int4", 1e9) == pytest.approx(2.5 / 2039)
    assert measured().encode_seconds("none", 1e9) == pytest.approx(4 / 2039)
