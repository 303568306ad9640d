"""`python -m foredraft` is the same as the command `foredraft`."""

from foredraft.cli.main import run

run()
