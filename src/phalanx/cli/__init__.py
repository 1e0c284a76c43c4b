"""The ``phalanx`` command. Its modules import what is heavy inside the commands, so that help comes at once."""

from phalanx.cli.app import app, main

__all__ = ["app", "main"]
