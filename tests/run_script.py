"""python -m tests.run_script SCRIPT OPTIONS...: what `python SCRIPT OPTIONS...` does, and starts sooner."""

import runpy
import sys

from zeropp.tools.quick_import import import_quickly

if __name__ == "__main__":
    import_quickly("zeropp._apply")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
