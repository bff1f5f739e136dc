"""A job on a cluster: one torchrun per node, its output line by line, and how each rank ended."""

from __future__ import annotations

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
"""python -m torch.distributed.run, which starts sooner: see tools/quick_import.py."""
LINE_PREFIX = "[rank ${rank}] "  # torchrun fills it in
LINE_PATTERN = re.compile(r"\[rank (\d+)\] ?(.*)", re.DOTALL)
NOISE = "The hostname of the client socket cannot be retrieved"  # said by every process: a lab has no DNS
KEPT_LINES = 200
GRACE_SECONDS = 20.0
"""How long other nodes may go on after a torchrun failed, and how long a torchrun has to stop its ranks."""

OnLine = Callable[[str, str], None]
"""Called with who says it ("rank 2", or "node 1" for torchrun itself) and the line."""


def torchrun(
    rendezvous: Sequence[str], ranks: int, folder: Path, logs: str, program: Sequence[str]
) -> list[str]:
    """The command that starts `ranks` ranks of a Python program (["train.py", ...] or ["-m", "module", ...]).
    Each leaves its exit code in `folder`."""
    return [
        *(*TORCHRUN, *rendezvous, "--nproc-per-node", str(ranks)),
        *("--tee", "3", "--log-dir", str(folder / logs)),
        *(str(Path(__file__).with_name("exit_code.py")), str(folder), *program),
    ]


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, for ranks. One thread per rank, unless the user says otherwise: all ranks
    share this machine's cores."""
    ours = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": LINE_PREFIX, **extra}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **ours}


class JobError(RuntimeError):
    """A job failed or took too long."""


@dataclass(frozen=True)
class JobResult:
    exit_codes: dict[int, int | None]
    """How each rank ended. Negative: ended by that signal. None: it was killed before it could tell."""
    seconds: float
    last_lines: dict[str, list[str]]
    """What each rank and node said last."""

    @property
    def succeeded(self) -> bool:
        return all(code == 0 for code in self.exit_codes.values())

    def check(self) -> JobResult:
        """Raise if a rank failed, with the last words of those that did."""
        if not self.succeeded:
            raise JobError(self.explain("the job failed"))
        return self

    def explain(self, what: str) -> str:
        """How ranks ended that did not succeed, their last lines, and what to try."""
        failed = {rank: code for rank, code in self.exit_codes.items() if code != 0}
        codes = ", ".join(f"rank {rank} {describe_exit(code)}" for rank, code in failed.items())
        words = [
            f"--- {who}\n" + "\n".join(lines[-30:])
            for who, lines in sorted(self.last_lines.items())
            if who.startswith("node") or int(who.split()[1]) in failed
        ]
        return "\n".join([f"{what} ({codes})", *words, *self.advice()])

    def advice(self) -> list[str]:
        """A line for each exit code whose cause is known."""
        known = {advise_on_exit(code): None for code in self.exit_codes.values()}
        return [f"Try: {text}" for text in known if text]


class Job:
    """One torchrun per node, each with `ranks_per_node` ranks. `Cluster.start` makes them."""

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
                start_new_session=True,  # Ctrl-C is ours to handle
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
        """Wait until all nodes are done. Stops the job at the timeout, and soon after one node failed."""
        next_call = time.monotonic() + 1.0
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        failed_at: float | None = None
        try:
            while any(process.poll() is None for process in self.processes):
                now = time.monotonic()
                if failed_at is None and any(process.poll() for process in self.processes):
                    failed_at = now
                if failed_at is not None and now > failed_at + GRACE_SECONDS:
                    break
                if deadline is not None and now > deadline:
                    raise JobError(f"the job is not done after {timeout_seconds:g} seconds; it was stopped")
                if each_second is not None and now > next_call:
                    each_second()
                    next_call = now + 1.0
                time.sleep(0.05)
        finally:
            self.stop()
        return self.result()

    def stop(self) -> None:
        """End whatever is still running: politely, then not."""
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
        self._kill()  # ranks that outlived their torchrun
        for reader in self._readers:
            reader.join()

    def _exit_codes(self) -> dict[int, int | None]:
        files = {rank: self._exit_folder / str(rank) for rank in range(self._ranks)}
        return {rank: int(file.read_text()) if file.exists() else None for rank, file in files.items()}

    def _ranks_succeeded(self) -> bool:
        """Then a torchrun may still complain that another one, with its store, is gone first."""
        return all(code == 0 for code in self._exit_codes().values())

    def result(self) -> JobResult:
        """How the ranks ended, after `stop`."""
        with self._lock:
            last_lines = {who: list(lines) for who, lines in self._last_lines.items()}
        return JobResult(self._exit_codes(), time.monotonic() - self._started, last_lines)

    def _read(self, node: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            match = LINE_PATTERN.match(raw)
            who, line = (f"rank {match[1]}", match[2]) if match else (f"node {node}", raw)
            if NOISE not in line and (match or not self._ranks_succeeded()):
                self._take(who, line.rstrip("\n"))
        process.stdout.close()

    def _take(self, who: str, line: str) -> None:
        with self._lock:
            self._last_lines.setdefault(who, deque(maxlen=KEPT_LINES)).append(line)
            if self._log_folder is not None:
                line += self._write_log(self._log_folder, who, line)
            if self._on_line is not None:
                self._on_line(who, line)

    def _write_log(self, folder: Path, who: str, line: str) -> str:
        """Returns what to add to the line, if logs end with it: the job goes on without them."""
        try:
            with open(folder / f"{who.replace(' ', '-')}.log", "a") as log:
                log.write(line + "\n")
        except OSError as error:
            self._log_folder = None
            return f" [no more logs: {error.strerror}: {error.filename or folder}]"
        return ""
