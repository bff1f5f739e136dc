"""Protection against CPUs that announce AMX and cannot run it.

[Note: AMX]
Some hypervisors announce AMX (`amx_bf16` among the CPU's flags), the kernel grants it, and the first AMX
instruction ends the process with SIGILL. oneDNN computes torch's matrix products in bf16 and trusts the
flags. The variable ONEDNN_MAX_CPU_ISA limits the instructions that oneDNN uses. oneDNN reads it at its first
use, so the cap can be set until then, also after `import torch`.

Tests and the demonstration run with the cap on every machine (`cap_onednn`): they work on such a CPU, and a
product has the same bits with and without AMX. Training runs a trial instead of trusting the flags
(`make_bf16_safe`), because working AMX is fast.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from .._file_lock import locked

CAP_VARIABLE, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
TRIAL = (sys.executable, "-c", PRODUCT)
"""Command of a trial. It exits with 0 or dies by a signal."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def cap_onednn() -> None:
    """Keep oneDNN below AMX in this process and its children. An existing value of the variable stays."""
    os.environ.setdefault(CAP_VARIABLE, CAP)


def announces_amx() -> bool:
    """Return whether the CPU's flags include AMX for bf16 matrices."""
    import torch

    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def make_bf16_safe(trial: tuple[str, ...] = TRIAL, folder: Path | None = None) -> tuple[bool, str]:
    """Run a bf16 product in a separate process, and cap oneDNN if the product ends that process.

    Call this before the first product in bf16. Returns whether bf16 products are safe from now on, and a
    sentence for the user, which is empty if they were safe from the start. `folder` caches the results, so
    one trial runs per machine and boot. If `folder` is not writable, every call runs the trial.
    """
    if not announces_amx():
        return True, ""
    folder = _cache_folder() if folder is None else folder
    code = _try_once(trial, folder)
    if code >= 0:  # also if the trial failed for another reason than the CPU
        return True, ""
    name = signal.Signals(-code).name
    died = f"a product in bf16 ends the process ({name}): the CPU announces AMX and cannot run it"
    if CAP_VARIABLE in os.environ:
        value = os.environ[CAP_VARIABLE]
        return False, f"{died}; {CAP_VARIABLE} is {value!r}, expected {CAP} or lower"
    cap_onednn()
    if _try_once(trial, folder) < 0:
        return False, f"{died}, also with {CAP_VARIABLE}={CAP}; compute in fp32"
    return True, f"{died}; {CAP_VARIABLE}={CAP} is set for this process, set it for the job as well"


def _try_once(trial: tuple[str, ...], folder: Path) -> int:
    """Return the exit code of the trial in the current environment, from `folder` if this boot has run it."""
    import torch

    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"
    known = folder / f"bf16-{boot}-torch-{torch.__version__}-{os.environ.get(CAP_VARIABLE, 'uncapped')}"
    with locked(folder):  # one rank of a node runs the trial, and the others read its result
        with suppress(OSError, ValueError):
            return int(known.read_text())
        code = subprocess.run(trial, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        with suppress(OSError):
            known.write_text(str(code))
        return code


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zeropp")
