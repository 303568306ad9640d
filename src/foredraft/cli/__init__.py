"""The command `foredraft`: one file per command."""
