"""Errors of the interpreter. Each one is a defect: of the PTX, of the launch, or a gap of the interpreter."""


class PtxError(Exception):
    """A program that the interpreter does not run."""


class UnknownInstructionError(PtxError):
    """Syntax, an instruction or a modifier outside the subset of docs/ptx.md."""


class UnwrittenValueError(PtxError):
    """A value that was never written reaches memory, an address, a predicate or a branch."""


class BadAccessError(PtxError):
    """An access outside the tensors of the launch or outside shared memory, or a misaligned one."""


class RaceError(PtxError):
    """Two threads touch the same byte, at least one writes, and no barrier is between them."""


class DivergenceError(PtxError):
    """Threads disagree where all have to agree: in a branch, a shuffle, a barrier."""


class LaunchError(PtxError):
    """A launch that the CUDA driver refuses."""
