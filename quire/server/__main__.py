"""`python -m quire.server` is `quire serve`."""

import sys

from quire.cli.app import app

app(["serve", *sys.argv[1:]], prog_name="quire")
