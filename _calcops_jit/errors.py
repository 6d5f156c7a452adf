"""The error of a library that cannot be built or loaded."""

from __future__ import annotations

import errno

_MAX_LINES = 12
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # errors that say nothing about the file


class BuildError(RuntimeError):
    """A library could not be built or loaded. The message says why, in at most twelve lines."""

    __module__ = "calcops_jit"

    def _render_traceback_(self) -> list[str]:
        """The lines that a notebook shows in place of a traceback."""
        return [f"BuildError: {self}"]


def report(what: str, evidence: list[str], fix: str, log: str = "") -> BuildError:
    """Make a BuildError: what failed, lines that show it, a command that fixes it, the log."""
    tail = [f"  fix: {fix}"] if fix else []
    if log:
        tail.append(f"  log: {log}")
    room = _MAX_LINES - 1 - len(tail)
    return BuildError(
        "\n".join([what, *(f"  {line.rstrip()[:200]}" for line in evidence[:room]), *tail])
    )
