"""`python -m quire` is the command `quire`."""

from quire.cli.app import app

app(prog_name="quire")
