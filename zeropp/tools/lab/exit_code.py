"""Wrapper of a rank that reports its exit code. torchrun runs exit_code.py FOLDER PROGRAM...

torchrun reports the exit code of the first failed rank only. This script runs the program, writes its exit
code to FOLDER/<rank> (negative: a signal), and exits with the same code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(folder: str, *program: str) -> int:
    # faulthandler prints the stack of a rank that a signal ends.
    process = subprocess.Popen([sys.executable, "-u", "-X", "faulthandler", *program])
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    file = Path(folder, os.environ["RANK"])
    file.with_suffix(".new").write_text(str(code))
    file.with_suffix(".new").rename(file)  # atomic, so that readers never see half a file
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
