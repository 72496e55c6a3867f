"""Measure quire next to transformers: throughput.py [MODEL] [--case single|batch|all] [--rounds N]

The same as `quire bench`; see `quire bench --help`.
"""

import sys

from quire.cli.app import app

app(["bench", *sys.argv[1:]], prog_name="throughput.py")
