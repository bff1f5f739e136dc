"""The convergence study: validation losses of one GPT, trained with each technique and several seeds.

    torchrun --standalone --nproc-per-node 4 benchmarks/convergence.py
    torchrun --standalone --nproc-per-node 4 benchmarks/convergence.py --text shakespeare.txt --steps 3000

Four local ranks simulate two nodes of two. The seed of a run determines weights and data, so runs of one seed
differ only in their communication. Results are saved after each run; a second start continues the study.
"""

from __future__ import annotations

import gc
import json
import logging
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zeropp import Config
from zeropp.tools.models.loading import ModelConfig
from zeropp.tools.train.config import (
    BatchConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    read_run,
)
from zeropp.tools.train.data import DataConfig
from zeropp.tools.train.trainer import Trainer
from zeropp.tools.train.world import World, join_world

NODE_SIZE = 2
TEXT_BYTES = 1_115_394  # the size of tinyshakespeare
ALLOWED = 0.003
"""Allowed loss of a recommended Config above plain FSDP2, unless seeds differ by more."""

PLAIN = "plain FSDP2"
STRATEGIES = {
    PLAIN: Config.off(),
    "qwZ": Config.off(route="two-hop", weights="int8"),
    "hpZ": Config.off(route="two-hop", secondary=True),
    "qgZ": Config.off(route="two-hop", gradients_in_node="int4", gradients_across="int4"),
    "paper": Config.paper(),
    "default": Config(),
    "no rotation": Config(rotate=False),
    "four_bit": Config.four_bit(),
    "direct int4 weights": Config(weights="int4"),
}
MICRO_BATCH_STRATEGIES = {"pending in bf16": Config(gradients_pending="bf16")}
"""Strategies that differ from the others only if a step has several micro-batches."""


@dataclass
class Options:
    """The training; a run of the default size takes about a minute on two cores."""

    steps: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    strategies: tuple[str, ...] = ()
    """Names of strategies; empty: all."""
    extra: Path | None = None
    """A TOML file with more strategies: one table each, with keys as in [zeropp] of `zeropp train`."""
    text: Path | None = None
    """A text file; None: the first 1.1 MB of the Python standard library's source code."""
    layers: int = 2
    width: int = 96
    heads: int = 3
    sequence: int = 64
    batch: int = 4
    """Sequences per rank and micro-batch."""
    micro_batches: int = 1
    """Micro-batches per step. Strategies with two hops reduce all but the last one inside the node only."""
    learning_rate: float = 3e-3
    folder: Path = Path("runs/convergence")
    """Folder of results.json and results.md."""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    logging.getLogger("zeropp").setLevel(logging.ERROR)
    strategies = choose_strategies(options)
    with join_world(timeout_seconds=600.0) as world:
        text = prepare(options, world)
        results = load(options, text)
        left = [
            (name, seed) for seed in options.seeds for name in strategies if find(results, name, seed) is None
        ]
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
        with Progress(
            *columns, TimeRemainingColumn(), disable=not world.is_first, speed_estimate_period=600
        ) as progress:
            task = progress.add_task("", total=max(1, len(left) * options.steps))
            for name, seed in left:
                progress.update(task, description=f"{name}, seed {seed}")
                result = train(
                    make_run(options, text, strategies[name], seed), world, lambda: progress.advance(task)
                )
                results["runs"].append({"strategy": name, "seed": seed, **result})
                if world.is_first:
                    save(options.folder / "results.json", json.dumps(results, indent=1))
        if world.is_first:
            table = render(results, list(strategies), options.seeds)
            save(options.folder / "results.md", table)
            Console().print(Markdown(table))
            print(f"results: {options.folder / 'results.json'}, {options.folder / 'results.md'}")


def choose_strategies(options: Options) -> dict[str, Config]:
    """Return the chosen strategies by name, all with the same size of nodes."""
    known = STRATEGIES | (MICRO_BATCH_STRATEGIES if options.micro_batches > 1 else {})
    if options.extra is not None:
        for name, table in tomllib.loads(options.extra.read_text()).items():
            config = read_run({"zeropp": table}).zeropp
            if not isinstance(config, Config):
                raise ValueError(
                    f"{name} in {options.extra} has preset {config!r}; expected one Config to study"
                )
            known[name] = config
    if unknown := [name for name in options.strategies if name not in known]:
        raise ValueError(f"strategies has {unknown[0]!r}; expected some of {', '.join(known)}")
    chosen = options.strategies or tuple(known)
    return {name: Config(**asdict(known[name]) | {"node_size": NODE_SIZE}) for name in chosen}


def prepare(options: Options, world: World) -> Path:
    """Make the folder and its text. Return the path of the text."""
    text = options.text or options.folder / "text.txt"
    if world.is_first:
        options.folder.mkdir(parents=True, exist_ok=True)
        if options.text is None:
            files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
            text.write_bytes(b"".join(file.read_bytes() for file in files)[:TEXT_BYTES])
    dist.barrier()
    return text


def make_run(options: Options, text: Path, config: Config, seed: int) -> RunConfig:
    model = ModelConfig(
        layers=options.layers, width=options.width, heads=options.heads, context=options.sequence
    )
    return RunConfig(
        steps=options.steps,
        seed=seed,
        model=model,
        data=DataConfig(source=str(text), validation_fraction=0.1),
        batch=BatchConfig(sequence=options.sequence, size=options.batch, micro_batches=options.micro_batches),
        optimizer=OptimizerConfig(learning_rate=options.learning_rate),
        schedule=ScheduleConfig(warmup_steps=min(100, options.steps // 10)),
        zeropp=config,
        evaluation=EvaluationConfig(batches=64),
    )


def train(run: RunConfig, world: World, advance: Callable[[], None]) -> dict[str, Any]:
    """Train once. Return the validation loss after each quarter of the steps, and other results."""
    trainer = Trainer(run, world)
    curve, sent, seconds = [], 0, 0.0
    for step in range(1, run.steps + 1):
        result = trainer.step()
        sent, seconds = sent + result.across_bytes, seconds + result.seconds
        if step % max(1, run.steps // 4) == 0 or step == run.steps:
            curve.append((step, trainer.evaluate()))
        advance()
    outcome = {
        "validation_loss": curve[-1][1],
        "curve": curve,
        "across_bytes_per_parameter": sent / run.steps / trainer.zpp.nodes / trainer.parameters,
        "seconds": seconds,
        "parameters": trainer.parameters,
    }
    del trainer
    gc.collect()  # frees the model, and zeropp's global optimizer hooks with it
    return outcome


def load(options: Options, text: Path) -> dict[str, Any]:
    """Return the results of earlier starts of the same study. Every rank reads the same file."""
    sizes = {name: value for name, value in asdict(options).items() if isinstance(value, (int, float))}
    settings = sizes | {"text": str(options.text or "stdlib"), "text_bytes": text.stat().st_size}
    path = options.folder / "results.json"
    results: dict[str, Any] = {"settings": settings, "runs": []}
    if path.exists():
        results = json.loads(path.read_text())
        if results["settings"] != settings:
            raise ValueError(
                f"{path} is from another study: {results['settings']}; this study has {settings}; choose "
                "another --folder, or remove the file"
            )
    dist.barrier()  # all ranks read before the first rank writes
    return results


def save(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)  # atomic: a crash leaves the old file or the new one


def find(results: dict[str, Any], name: str, seed: int) -> dict[str, Any] | None:
    return next((run for run in results["runs"] if (run["strategy"], run["seed"]) == (name, seed)), None)


def render(results: dict[str, Any], strategies: list[str], seeds: tuple[int, ...]) -> str:
    """Return a table in Markdown and a verdict on the recommended Configs."""
    losses = {
        name: [run["validation_loss"] for s in seeds if (run := find(results, name, s))]
        for name in strategies
    }
    settings = results["settings"]
    lines = [
        f"{settings['steps']} steps of {settings['micro_batches']} micro-batches, {settings['layers']} "
        f"layers of width {settings['width']}, text: "
        f"{settings['text']} ({settings['text_bytes']:,} bytes), torch {torch.__version__}",
        "",
        "| | validation loss, mean | lowest to highest seed | vs plain FSDP2 | bytes across nodes |",
        "|---|---|---|---|---|",
    ]
    for name in strategies:
        sent = find(results, name, seeds[0])
        lines.append(
            f"| {name} | {mean(losses[name]):.4f} | {min(losses[name]):.4f} to {max(losses[name]):.4f} | "
            f"{_against_plain(losses, name)} | {sent['across_bytes_per_parameter'] if sent else 0:.2f} |"
        )
    lines += ["", "Bytes are sent per node, parameter and step, from the ledger."]
    return "\n".join([*lines, "", *_verdict(losses)]) + "\n"


def _against_plain(losses: dict[str, list[float]], name: str) -> str:
    if PLAIN not in losses or name == PLAIN:
        return "-"
    return f"{mean(losses[name]) / mean(losses[PLAIN]) - 1:+.2%}"


def _verdict(losses: dict[str, list[float]]) -> list[str]:
    sentences = []
    for name in ("default", "four_bit"):
        if PLAIN not in losses or name not in losses:
            continue
        difference = mean(losses[name]) / mean(losses[PLAIN]) - 1
        inside = min(losses[PLAIN]) <= mean(losses[name]) <= max(losses[PLAIN])
        sentences.append(
            f"{name} ends {difference:+.2%} from plain FSDP2 (allowed: {ALLOWED:.1%}, or inside the spread "
            f"of plain FSDP2's seeds, where it is{'' if inside else ' not'})."
        )
    return sentences


if __name__ == "__main__":
    main()
