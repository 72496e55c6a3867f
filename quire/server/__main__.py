"""`python -m quire.server` is `quire serve`."""

import sys

from quire.server.cli import app

app(["serve", *sys.argv[1:]], prog_name="quire")
