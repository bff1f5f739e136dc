"""Runs one rank of a lab job and reports its exit: exit_code.py FOLDER PROGRAM..., run by torchrun in the
place of the program.

torchrun tells the exit code of the first rank that failed. This one runs the program, leaves its exit code in
FOLDER/<rank> (negative: the signal that ended it), and ends with the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(folder: str, *program: str) -> int:
    # faulthandler: a rank that a signal ends says where it was.
    process = subprocess.Popen([sys.executable, "-u", "-X", "faulthandler", *program])
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    told = Path(folder, os.environ["RANK"])
    told.with_suffix(".new").write_text(str(code))
    told.with_suffix(".new").rename(told)  # whole, or not there
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
