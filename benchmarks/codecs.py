"""Error, bias and bits of every codec setting: the tables of docs/codecs.md.

    python benchmarks/codecs.py --markdown tables.md

The inputs are random numbers, and gradients and weights of a small GPT (the quickstart's), which this script
trains for some dozens of steps on the source code of Python's standard library. It is one process: reductions
over several ranks use the codecs' operations, in the order of the hops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from zeropp.comm.chunks import Piece, row_segments
from zeropp.quant import BlockFormat, CastFormat, Codec, make_codec
from zeropp.quant.codec import Part

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import quickstart  # type: ignore[import-not-found, unused-ignore]
from outliers import gradients_with_outliers  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True)
class Options:
    """The measurement. The defaults take about a minute on one core."""

    steps: int = 50
    """Training steps before gradients and weights are recorded."""
    elements: int = 1 << 19
    """Random numbers of each kind."""
    seeds: int = 16
    """Encodings of the same numbers, for the bias."""
    markdown: Path | None = None
    """File to which the tables are written."""


class Section(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Recording:
    """Weights and gradients of the training run."""

    weights: nn.Module
    history: Tensor
    """Gradients of all steps, [steps, parameters]."""
    of_ranks: Tensor
    """Gradients after the last step, of one batch per rank, [64, parameters]."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    console = Console(width=140)
    recording = record(options, ranks=64)
    sections = [
        one_encoding(options, recording),
        rotations(options, recording),
        outliers(options),
        two_hops(recording),
        feedback(recording),
        alignment(recording),
    ]
    for section in sections:
        table = Table(*section.columns, title=section.title)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    if options.markdown:
        options.markdown.write_text("\n".join(line for section in sections for line in to_markdown(section)))


def record(options: Options, ranks: int) -> Recording:
    job = quickstart.Options(layers=4, width=128, batch=8)
    torch.manual_seed(0)
    model = quickstart.Gpt(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    data, _ = quickstart.load_text()
    generator = torch.Generator().manual_seed(0)

    def gradients() -> Tensor:
        optimizer.zero_grad()
        model(*quickstart.sample(data, job, generator)).backward()
        return flat(parameter.grad for parameter in model.parameters())

    history = []
    for _ in track(range(options.steps), "Training"):
        history.append(gradients())
        optimizer.step()
    of_ranks = torch.stack([gradients() for _ in track(range(ranks), "Gradients of all ranks")])
    return Recording(model, torch.stack(history), of_ranks)


def make_samples(options: Options, recording: Recording) -> dict[str, Tensor]:
    torch.manual_seed(1)
    n = options.elements
    return {
        "N(0, 1)": torch.randn(n),
        "N(1, 1)": torch.randn(n) + 1,
        "Student t3": torch.distributions.StudentT(3.0).sample((n,)),
        "log-normal mix": torch.randn(n) * torch.exp(1.5 * torch.randn(n)),
        "gradients": recording.of_ranks[0],
        "weights": flat(recording.weights.parameters()),
    }


def one_encoding(options: Options, recording: Recording) -> Section:
    samples = make_samples(options, recording)
    rows = []
    for name, codec, bits in settings():
        row = [name, f"{bits:.3f}"]
        for x in samples.values():
            decoded = torch.stack([roundtrip(codec, x, seed) for seed in range(options.seeds)])
            error, bias = relative(decoded[0], x), relative(decoded.mean(0), x)
            row.append(f"{error:.4f} / {bias:.4f} / {gain(decoded.mean(0), x):+.2%}")
        rows.append(row)
    title = f"One encoding: relative error / error of the mean of {options.seeds} encodings / gain"
    return Section(title, ["codec", "bits per element", *samples], rows)


def rotations(options: Options, recording: Recording) -> Section:
    """Compare group sizes and signs of rotations: the error of int4, block 128."""
    samples = make_samples(options, recording)
    samples["gradients of the MLP's second matrices"] = flat(
        p.grad for name, p in recording.weights.named_parameters() if name.endswith("down.weight")
    )
    plain, ours = BlockFormat(4, 128), BlockFormat(4, 128, rotate=True)
    rows = [["none", "-", *(f"{relative(roundtrip(plain, x), x):.4f}" for x in samples.values())]]
    for size in (32, 64, 128):
        random_signs = torch.randint(0, 2, (size,)) * 2 - 1
        for name, signs in (("none", torch.ones(size)), ("random", random_signs)):
            matrix = signs.unsqueeze(1) * hadamard(size)
            rotated = [x[: len(x) // size * size].view(-1, size) @ matrix for x in samples.values()]
            errors = (relative(roundtrip(plain, x.view(-1)), x.view(-1)) for x in rotated)
            rows.append([str(size), name, *(f"{error:.4f}" for error in errors)])
    rows.append(["64", "ours", *(f"{relative(roundtrip(ours, x), x):.4f}" for x in samples.values())])
    return Section("Other rotations: relative error of int4, block 128", ["group", "signs", *samples], rows)


def outliers(options: Options) -> Section:
    """Compare rotation on blocks with and without outliers."""
    formats = [BlockFormat(bits, 128, rotate) for bits in (8, 4) for rotate in (False, True)]
    rows = []
    for name, x in track(list(gradients_with_outliers(options.steps)), "Outliers"):
        blocks = x[: len(x) // 128 * 128].view(-1, 128)
        blocks = blocks[blocks.any(1)]
        peaks = blocks.abs().amax(1) / blocks.square().mean(1).sqrt()
        errors = (f"{relative(roundtrip(fmt, x), x):.4f}" for fmt in formats)
        rows.append([name, f"{peaks.median():.1f}", f"{peaks.quantile(0.99):.1f}", *errors])
    columns = ["gradients", "max / rms of a block: median", "99%", *map(name_of, formats)]
    return Section("Outliers: relative error", columns, rows)


def hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    return matrix


def settings() -> Iterator[tuple[str, BlockFormat | CastFormat, float]]:
    yield "bf16", CastFormat(torch.bfloat16), 16
    for bits, block_sizes in ((8, (128, 256)), (4, (64, 128, 256))):
        for block_size in block_sizes:
            for rotate in (False, True):
                for stochastic in (False, True):
                    fmt = BlockFormat(bits, block_size, rotate, stochastic)
                    yield name_of(fmt), fmt, fmt.effective_bits


def name_of(fmt: BlockFormat) -> str:
    options = ", rotated" * fmt.rotate + ", stochastic" * fmt.stochastic
    return f"int{fmt.bits}, block {fmt.block_size}{options}"


def two_hops(recording: Recording) -> Section:
    """Reduce gradients over all ranks: int8 or int4 in the node, int4 across."""
    pairs = [
        (BlockFormat(bits, 128, first_rotates, stochastic), BlockFormat(4, 128, second_rotates, stochastic))
        for bits in (8, 4)
        for first_rotates, second_rotates in ((False, False), (True, True), (False, True))
        for stochastic in (False, True)
    ]
    rows = []
    for first, second in pairs:
        row = [name_of(first), name_of(second)]
        for nodes, local_ranks in ((2, 2), (8, 8)):
            x = recording.of_ranks[: nodes * local_ranks].view(nodes, local_ranks, -1)
            result = reduce_in_two_hops(x, first, second, seed=0)
            mean = x.mean((0, 1))
            row += [f"{relative(result, mean):.4f}", f"{gain(result, mean):+.2%}"]
        rows.append(row)
    columns = ["in the node", "across", "error, 2 x 2", "gain", "error, 8 x 8", "gain"]
    return Section("Two hops: the mean of real gradients of all ranks", columns, rows)


def reduce_in_two_hops(x: Tensor, first_fmt: BlockFormat, second_fmt: BlockFormat, seed: int) -> Tensor:
    """Return the mean of `x` [nodes, ranks, P]. Every rank sends its gradients as one row, which has the same
    error as one row per receiver."""
    nodes, ranks, numel = x.shape
    first, second = (Codec([Part(numel, fmt)]) for fmt in (first_fmt, second_fmt))
    across = torch.empty(nodes, 1, second.row_bytes, dtype=torch.uint8)
    in_node = torch.empty(ranks, 1, first.row_bytes, dtype=torch.uint8)
    for node in range(nodes):
        for rank in range(ranks):
            first.encode(x[node, rank].unsqueeze(0), in_node[rank], seed=seed + 1 + node * ranks + rank)
        recode_seed = seed + 1 + nodes * ranks + node
        first.recode(in_node, second, across[node], 1 / (nodes * ranks), seed=recode_seed)
    out = torch.empty(1, numel)
    second.decode_sum(across, out)
    return out[0]


def feedback(recording: Recording) -> Section:
    """Encode the gradients of all steps as int4 and add the error of each step to the next. LoCo averages
    errors."""
    total, state_codec = recording.history.sum(0), BlockFormat(8, 128)
    rows = []
    for name, codec in (
        ("int4, block 128", BlockFormat(4, 128)),
        ("int4, block 128, rotated", BlockFormat(4, 128, rotate=True)),
    ):
        for weight, state_name in ((0.0, "none"), (1.0, "fp32"), (1.0, "int8"), (0.5, "fp32"), (0.5, "int8")):
            sent, state, state_error = torch.zeros_like(total), torch.zeros_like(total), 0.0
            single = 0.0
            for gradient in recording.history:
                wanted = gradient + state
                decoded = roundtrip(codec, wanted)
                sent += decoded
                single += relative(decoded, gradient) / len(recording.history)
                if weight:
                    exact = (1 - weight) * state + weight * (wanted - decoded)
                    state = roundtrip(state_codec, exact) if state_name == "int8" else exact
                    state_error += relative(state, exact) / len(recording.history)
            average = f"{weight:.1f}" if weight else "-"
            drift, error = f"{relative(sent, total):.4f}", f"{single:.4f}"
            rows.append([name, state_name, average, error, drift, f"{state_error:.4f}" if weight else "-"])
    columns = [
        "codec",
        "state",
        "weight of the new loss",
        "error of a step",
        "error of the sum",
        "of the state",
    ]
    return Section(f"Error feedback over {len(recording.history)} steps", columns, rows)


def alignment(recording: Recording) -> Section:
    """Encode the weights of one unit in FSDP2's layout: for each rank, its padded shards of all
    parameters."""
    torch.manual_seed(2)
    width = 1024
    made = {
        "norm1": 1 + 0.1 * torch.randn(width),
        "q": 0.02 * torch.randn(width, width),
        "kv": 0.02 * torch.randn(width // 2, width),
        "out": 0.02 * torch.randn(width, width),
        "norm2": 1 + 0.1 * torch.randn(width),
        "up": 0.02 * torch.randn(4 * width, width),
        "down": 0.02 * torch.randn(width, 4 * width),
    }
    trained = {name: p.detach() for name, p in recording.weights.blocks[0].named_parameters()}  # type: ignore[index, union-attr]
    rows = []
    for model, parameters in (("trained, width 128", trained), (f"made up, width {width}", made)):
        for ranks in (4, 64):
            for bits in (8, 4):
                rows.append(
                    [model, str(ranks), *compare_alignment(parameters, ranks, BlockFormat(bits, 128))]
                )
    columns = [
        "unit",
        "ranks",
        "codec",
        "matrices: mixed",
        "as sent",
        "where mixed: mixed",
        "as sent",
        "share",
        "bytes",
    ]
    return Section("Blocks that respect parameters: relative error", columns, rows)


def compare_alignment(parameters: dict[str, Tensor], ranks: int, fmt: BlockFormat) -> list[str]:
    shards = [padded_shards(parameter, ranks) for parameter in parameters.values()]  # each [ranks, elements]
    is_matrix = torch.cat(
        [torch.full_like(shard, p.ndim > 1) for p, shard in zip(parameters.values(), shards, strict=True)], 1
    ).bool()
    segments = row_segments([Piece(shard.shape[1]) for shard in shards], fmt.block_size)
    name: Literal["int8", "int4"] = "int8" if fmt.bits == 8 else "int4"
    codecs: dict[str, Codec] = {
        "mixed": Codec([Part(is_matrix.shape[1], fmt)]),
        "sent": make_codec(name, torch.float32, segments),
    }
    x = torch.cat(shards, dim=1)
    decoded = {name: roundtrip(codec, x) for name, codec in codecs.items()}
    row_bytes = {name: codec.row_bytes for name, codec in codecs.items()}
    blocks = nn.functional.pad(is_matrix[0].float(), (0, -x.shape[1] % fmt.block_size)).view(
        -1, fmt.block_size
    )
    has_both = (blocks.amax(1) > blocks.amin(1)).repeat_interleave(fmt.block_size)[: x.shape[1]]
    in_mixed = is_matrix & has_both
    error = {name: f"{relative(y[is_matrix], x[is_matrix]):.4f}" for name, y in decoded.items()}
    where_mixed = {
        name: f"{relative(y[in_mixed], x[in_mixed]):.4f}" if in_mixed.any() else "-"
        for name, y in decoded.items()
    }
    more = {name: f"{nbytes / row_bytes['mixed'] - 1:+.2%}" for name, nbytes in row_bytes.items()}
    return [
        name_of(fmt),
        *(error["mixed"], error["sent"]),
        *(where_mixed["mixed"], where_mixed["sent"]),
        f"{in_mixed.sum() / is_matrix.sum():.2%}",
        more["sent"],
    ]


def padded_shards(parameter: Tensor, ranks: int) -> Tensor:
    """Return the shards of dimension 0, each padded to the size of the first."""
    rows = -(-parameter.shape[0] // ranks)
    matrix = parameter.reshape(parameter.shape[0], -1)
    return nn.functional.pad(matrix, (0, 0, 0, rows * ranks - len(matrix))).view(ranks, -1)


def roundtrip(codec: Codec | BlockFormat | CastFormat, x: Tensor, seed: int = 0) -> Tensor:
    source = x.view(-1, x.shape[-1])
    if not isinstance(codec, Codec):
        codec = Codec([Part(source.shape[1], codec)])
    encoded = torch.empty(len(source), codec.row_bytes, dtype=torch.uint8)
    out = torch.empty_like(source)
    codec.encode(source, encoded, seed=seed)
    codec.decode(encoded, out)
    return out.view(x.shape)


def relative(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


def gain(y: Tensor, x: Tensor) -> float:
    """Return the relative excess length of y in the direction of x: an error that averaging does not
    reduce."""
    return float((y.double() - x.double()) @ x.double() / (x.double() @ x.double()))


def flat(tensors: object) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])  # type: ignore[attr-defined]


def to_markdown(section: Section) -> Iterator[str]:
    yield from (f"**{section.title}**", "")
    yield "| " + " | ".join(section.columns) + " |"
    yield "|" + "---|" * len(section.columns)
    yield from ("| " + " | ".join(row) + " |" for row in section.rows)
    yield ""


if __name__ == "__main__":
    main(tyro.cli(Options))
