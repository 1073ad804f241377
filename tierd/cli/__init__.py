"""The `tierd` command: one verb a file, data on stdout, everything else on stderr."""

from tierd.cli.door import main

__all__ = ["main"]
