from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from tests.ranks import Ranks
from zeropp.tools.doctor.check import CheckReport, DoctorSettings
from zeropp.tools.doctor.run import Diagnosis, diagnose
from zeropp.tools.plan.catalog import find_hardware

RESULT = CheckReport("kernels", "int8", "compares", "ok", "the same", "", 1.0)


def two_parts() -> Diagnosis:
    progress: list[tuple[str, str]] = []
    diagnosis = diagnose(
        DoctorSettings(node_size=1),
        ("collectives", "surroundings"),
        20.0,
        lambda *what: progress.append(what),
    )
    assert progress == [(result.part, result.name) for result in diagnosis.results]
    return diagnosis


def test_the_selected_parts_run_in_order(ranks: Ranks) -> None:
    first, second = ranks.run(two_parts, world=2)
    assert first.subject == "2 ranks, cpu"
    assert [result.part for result in first.results] == ["surroundings"] * 5 + ["collectives"] * 5
    assert {result.name: result.state for result in first.results} == {
        result.name: result.state for result in second.results
    }
    assert first.is_healthy
    assert (first.steps, first.advice, first.hardware) == ([], [], None)


def test_a_diagnosis_is_saved_with_all_its_numbers(tmp_path: Path) -> None:
    hardware = find_hardware("a100-100g")
    diagnosis = Diagnosis("1 rank, cpu", [RESULT], [], ["do this"], hardware)
    diagnosis.save(tmp_path / "doctor.json")
    saved = json.loads((tmp_path / "doctor.json").read_text())
    assert saved["is_healthy"] is True
    assert saved["results"] == [asdict(RESULT)]
    assert saved["hardware"]["link_gbit_s"] == hardware.link_gbit_s
    assert saved["advice"] == ["do this"]


def test_a_warning_is_not_a_fault() -> None:
    results = [replace(RESULT, state=state) for state in ("ok", "not run", "warning")]
    assert Diagnosis("", results, [], [], None).is_healthy
    assert not Diagnosis("", [*results, replace(RESULT, state="fault")], [], [], None).is_healthy
