from __future__ import annotations

from dataclasses import replace

from zeropp.comm.ledger import render
from zeropp.tools.doctor.check import CheckReport, StepTime
from zeropp.tools.doctor.run import Diagnosis
from zeropp.tools.plan.catalog import find_hardware
from zeropp.tools.plan.hardware import Cost
from zeropp.tools.report.doctor import doctor_tables, render_doctor, verdict

GOOD = CheckReport("kernels", "int8", "compares <all>", "ok", "448 are the same [bit for bit]", "", 1.25)
BAD = CheckReport("collectives", "hop across", "sends", "fault", "rank 1: nothing", "do not train", 2.0)
STEP = StepTime("Config()", 1234.5, 1.5, 2_000_000.0, 0.25)
PLAIN = StepTime("FSDP2 as it comes", 1851.7, 1.0, 9_000_000.0, 0.1)
HARDWARE = replace(find_hardware("a100-100g"), measured={"all_gather across": Cost(12.0, 0.5)})
DIAGNOSIS = Diagnosis("4 ranks, cpu", [GOOD, BAD], [PLAIN, STEP], ["Use zeropp.Config()."], HARDWARE)


def test_tables_have_every_check_rate_and_step() -> None:
    text = " ".join(" ".join(render(table) for table in doctor_tables(DIAGNOSIS)).split())
    for expected in (
        "zeropp doctor: 4 ranks, cpu",
        "kernels: int8",
        "448 are the same [bit for bit]",
        "fault",
    ):
        assert expected in text
    assert "all_gather across │ 12 │ 2" in text
    assert "Config() │ 1,234.5 │ 1.50x │ 2.00 │ 25%" in text


def test_without_speed_there_is_one_table() -> None:
    assert len(doctor_tables(replace(DIAGNOSIS, steps=[], hardware=None))) == 1


def test_the_verdict_names_faults() -> None:
    assert verdict(DIAGNOSIS) == "1 of 2 checks found a fault: collectives: hop across"
    assert verdict(replace(DIAGNOSIS, results=[GOOD, GOOD])) == "no faults: 2 ok"


def test_the_page_has_every_part() -> None:
    text = render_doctor(DIAGNOSIS)
    assert text.startswith("<!doctype html>")
    for expected in (
        "1 of 2 checks found a fault",
        "Use zeropp.Config().",
        "compares &lt;all&gt;",
        "1.50x",
        "do not train",
    ):
        assert expected in text
