"""The error of a library that cannot be built or loaded."""

from __future__ import annotations

_MAX_LINES = 12


class BuildError(RuntimeError):
    """A library could not be built or loaded. The message says why, in at most twelve lines."""

    __module__ = "calcops_jit"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"BuildError: {self}"]


def report(what: str, evidence: list[str], fix: str, log: str = "") -> BuildError:
    """Return a BuildError.

    Args:
        what: what failed.
        evidence: lines that show the cause.
        fix: a command or an action that removes the cause.
        log: path of a file with all output.
    """
    last_lines = [f"  fix: {fix}"]
    if log:
        last_lines.append(f"  log: {log}")
    max_evidence_lines = _MAX_LINES - 1 - len(last_lines)
    lines = [f"  {line.rstrip()[:200]}" for line in evidence[:max_evidence_lines]]
    return BuildError("\n".join([what, *lines, *last_lines]))
