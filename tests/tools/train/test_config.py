"""The configuration of a run, from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp import Config
from zeropp.tools.models.loading import build_model, parameter_count
from zeropp.tools.train.config import RunConfig, ScheduleConfig, read_run, read_toml

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("name", "millions"),
    [("125M", (120, 130)), ("350M", (340, 370)), ("1.3B", (1200, 1400)), ("18B", (18000, 19000))],
)
def test_models_have_the_size_in_their_name(name: str, millions: tuple[int, int]) -> None:
    run = read_toml(CONFIGS / f"{name}.toml")
    size = parameter_count(build_model(run.model, seed=0, device="meta"))
    assert millions[0] < size / 1e6 < millions[1]
    assert run.batch.sequence <= run.model.gpt().context


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    assert read_toml(tmp_path / "run.toml") == RunConfig()


def test_presets_and_their_changes() -> None:
    assert read_run({"zeropp": {"preset": "wire16"}}).zeropp == Config.wire16()
    assert read_run({"zeropp": {"preset": "auto"}}).zeropp == read_run({}, "auto").zeropp == "auto"
    assert read_run({"zeropp": {"preset": "fsdp2", "node_size": 2}}).zeropp == Config.off(node_size=2)
    assert read_run({"zeropp": {"preset": "fsdp2", "node_size": 2}}, "paper").zeropp == Config.paper(
        node_size=2
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"optimizer": {"learning_rate": -1}},
            r"optimizer\.learning_rate is -1\.0; expected a positive number",
        ),
        (
            {"optimizer": {"betas": [0.9, 1.5]}},
            r"optimizer\.betas is \(0\.9, 1\.5\); expected two from 0 to 1",
        ),
        (
            {"zeropp": {"preset": "auto", "node_size": 2}},
            r"zeropp\.node_size is given with preset 'auto', which chooses the whole Config",
        ),
        ({"batch": {"size": 0}}, r"batch\.size is 0; expected a positive number"),
        ({"batch": {"sync": "never"}}, r"batch\.sync is 'never'; expected 'step' or 'micro-batch'"),
        (
            {"schedule": {"final_fraction": 2}},
            r"schedule\.final_fraction is 2\.0; expected a fraction from 0 to 1",
        ),
        ({"checkpoint": {"keep": 0}}, r"checkpoint\.keep is 0; expected a positive number"),
        ({"evaluation": {"every": -1}}, r"evaluation\.every is -1; expected a number of steps"),
        ({"logging": {"peak_tflops": -1}}, r"logging\.peak_tflops is -1\.0; expected TFLOP/s"),
        ({"steps": 0}, "steps is 0; expected a positive number"),
        ({"seed": -1}, "seed is -1; expected 0 or a positive number"),
        ({"zeropp": "paper"}, "zeropp is 'paper'; expected a table"),
        (
            {"zeropp": {"preset": "fast"}},
            r"zeropp\.preset is 'fast'; expected one of default, four-bit, paper",
        ),
        ({"zeropp": {"weight": "int8"}}, r"zeropp\.weight is not a key; expected one of preset, weights"),
        ({"zeropp": {"weights": "int3"}}, "weights is 'int3'; expected one of"),
    ],
)
def test_errors_name_an_invalid_value(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_run(table)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ValueError, match=r"run\.toml cannot be read"):
        read_toml(path)
    path.write_text("steps = ")
    with pytest.raises(ValueError, match=r"run\.toml is not TOML"):
        read_toml(path)
    path.write_text("step = 3")
    with pytest.raises(ValueError, match=r"run\.toml: step is not a key; expected one of folder, steps"):
        read_toml(path)


@given(st.integers(0, 50), st.integers(2, 100), st.floats(0.0, 1.0))
def test_the_learning_rate_goes_up_and_then_down(warmup: int, decay: int, final: float) -> None:
    schedule, steps = ScheduleConfig(warmup, final), warmup + decay
    rates = [schedule.learning_rate(step, steps, 3.0) for step in range(1, steps + 1)]
    assert rates[:warmup] == pytest.approx([3.0 * step / warmup for step in range(1, warmup + 1)])
    assert all(early >= late for early, late in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert rates[-1] == pytest.approx(3.0 * final)
    assert max(rates) <= 3.0 * (1 + 1e-12)


def test_the_learning_rate_of_a_run_that_ends_in_its_warmup() -> None:
    assert ScheduleConfig(warmup_steps=6).learning_rate(3, 3, 1.0) == 0.5
