"""python -m tests.lab FOLDER RUN...: see steps.py."""

from zeropp.quick_import import import_quickly

import_quickly("tests.lab.steps").main()
