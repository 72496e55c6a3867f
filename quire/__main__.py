"""`python -m quire` is the command `quire`."""

from quire.server.cli import app

app(prog_name="quire")
