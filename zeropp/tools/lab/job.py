"""A job on a cluster: one torchrun per node, the output by line, and the exit code of each rank."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..process_exit import advise_on_exit, describe_exit

TORCHRUN = (
    *(sys.executable, "-c"),
    "from zeropp.tools.quick_import import import_quickly; import_quickly('torch.distributed.run').main()",
)
"""python -m torch.distributed.run with a faster import: see tools/quick_import.py."""
LINE_PREFIX = "[rank ${rank}] "  # a template of torchrun
LINE_PATTERN = re.compile(r"\[rank (\d+)\] ?(.*)", re.DOTALL)
NOISE = "The hostname of the client socket cannot be retrieved"  # from every process: a lab has no DNS
LAST_LINES = 200
GRACE_SECONDS = 20.0
"""Time that other nodes may run after a torchrun has failed. Time that a torchrun has to stop its ranks."""

OnLine = Callable[[str, str], None]
"""Called with the source of a line ("rank 2", or "node 1" for torchrun) and the line."""


def torchrun(
    rendezvous: Sequence[str], ranks: int, folder: Path, logs: str, program: Sequence[str]
) -> list[str]:
    """Return the command that starts the ranks of one node. Each rank writes its exit code to `folder`.

    Args:
        rendezvous: options of torchrun.
        ranks: number of ranks.
        folder: folder for exit codes and for logs of torchrun.
        logs: name of the folder of torchrun's logs.
        program: ["train.py", ...] or ["-m", "module", ...].
    """
    return [
        *(*TORCHRUN, *rendezvous, "--nproc-per-node", str(ranks)),
        *("--tee", "3", "--log-dir", str(folder / logs)),
        *(str(Path(__file__).with_name("exit_code.py")), str(folder), *program),
    ]


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with settings for ranks. By default each rank has one thread, because
    all ranks share this machine's cores."""
    ours = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": LINE_PREFIX, **extra}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **ours}


class JobError(RuntimeError):
    """A job failed or took too long."""


@dataclass(frozen=True)
class JobResult:
    """The end of a job."""

    exit_codes: dict[int, int | None]
    """Exit code of each rank. Negative: a signal ended it. None: it was killed before it wrote its code."""
    seconds: float
    last_lines: dict[str, list[str]]
    """Last lines of output of each rank and node."""

    @property
    def succeeded(self) -> bool:
        return all(code == 0 for code in self.exit_codes.values())

    def check(self) -> JobResult:
        """Raise JobError if a rank has failed, with the last lines of the failed ranks."""
        if not self.succeeded:
            raise JobError(self.explain("the job failed"))
        return self

    def explain(self, what: str) -> str:
        """Return exit codes and last lines of the failed ranks, with advice."""
        failed = {rank: code for rank, code in self.exit_codes.items() if code != 0}
        codes = ", ".join(f"rank {rank} {describe_exit(code)}" for rank, code in failed.items())
        output = [
            f"--- {source}\n" + "\n".join(lines[-30:])
            for source, lines in sorted(self.last_lines.items())
            if source.startswith("node") or int(source.split()[1]) in failed
        ]
        return "\n".join([f"{what} ({codes})", *output, *self.advice()])

    def advice(self) -> list[str]:
        """Return a line for each exit code with a known cause."""
        known = {advise_on_exit(code): None for code in self.exit_codes.values()}
        return [f"Try: {text}" for text in known if text]


class Job:
    """One torchrun per node, each with `ranks_per_node` ranks. `Cluster.start` creates jobs."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        ranks_per_node: int,
        environment: dict[str, str],
        exit_folder: Path,
        *,
        on_line: OnLine | None = None,
        log_folder: Path | None = None,
        kill: Callable[[], object] = lambda: None,
    ) -> None:
        self._ranks = len(commands) * ranks_per_node
        self._exit_folder = exit_folder
        self._on_line = on_line
        self._log_folder = log_folder
        self._kill = kill
        self._lock = threading.Lock()
        self._last_lines: dict[str, deque[str]] = {}
        self._started = time.monotonic()
        self.processes = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that Ctrl-C reaches only this process, which stops the job
            )
            for command in commands
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(node, process), daemon=True)
            for node, process in enumerate(self.processes)
        ]
        for reader in self._readers:
            reader.start()

    def wait(
        self, timeout_seconds: float | None = None, each_second: Callable[[], None] | None = None
    ) -> JobResult:
        """Wait until all nodes are done.

        Stops the job at the timeout, and `GRACE_SECONDS` after the failure of a node.

        Args:
            timeout_seconds: maximum duration; JobError is raised after it. None: no limit.
            each_second: called about once per second.
        """
        now = time.monotonic()
        next_call = now + 1.0
        deadline = math.inf if timeout_seconds is None else now + timeout_seconds
        end_of_grace = math.inf
        try:
            while any(process.poll() is None for process in self.processes) and now <= end_of_grace:
                if now > deadline:
                    raise JobError(f"the job is not done after {timeout_seconds:g} seconds; it was stopped")
                if each_second is not None and now > next_call:
                    each_second()
                    next_call = now + 1.0
                time.sleep(0.05)
                now = time.monotonic()
                if end_of_grace == math.inf and any(process.poll() for process in self.processes):
                    end_of_grace = now + GRACE_SECONDS
        finally:
            self.stop()
        return self.result()

    def stop(self) -> None:
        """End all processes: by SIGTERM, and by SIGKILL after `GRACE_SECONDS`."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._kill()  # ranks that have outlived their torchrun
        for reader in self._readers:
            reader.join()

    def _exit_codes(self) -> dict[int, int | None]:
        files = {rank: self._exit_folder / str(rank) for rank in range(self._ranks)}
        return {rank: int(file.read_text()) if file.exists() else None for rank, file in files.items()}

    def _ranks_succeeded(self) -> bool:
        # A torchrun may then still complain that another one, which has the store, has ended before it.
        return all(code == 0 for code in self._exit_codes().values())

    def result(self) -> JobResult:
        """Return the end of the job, after `stop`."""
        with self._lock:
            last_lines = {source: list(lines) for source, lines in self._last_lines.items()}
        return JobResult(self._exit_codes(), time.monotonic() - self._started, last_lines)

    def _read(self, node: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            match = LINE_PATTERN.match(raw)
            source, line = (f"rank {match[1]}", match[2]) if match else (f"node {node}", raw)
            if NOISE not in line and (match or not self._ranks_succeeded()):
                self._add_line(source, line.rstrip("\n"))
        process.stdout.close()

    def _add_line(self, source: str, line: str) -> None:
        with self._lock:
            self._last_lines.setdefault(source, deque(maxlen=LAST_LINES)).append(line)
            if self._log_folder is not None:
                line += self._write_log(self._log_folder, source, line)
            if self._on_line is not None:
                self._on_line(source, line)

    def _write_log(self, folder: Path, source: str, line: str) -> str:
        """Write a line to its log. If that fails, end all logs and return a remark for the line."""
        try:
            with open(folder / f"{source.replace(' ', '-')}.log", "a") as log:
                log.write(line + "\n")
        except OSError as error:
            self._log_folder = None
            return f" [no more logs: {error.strerror}: {error.filename or folder}]"
        return ""
