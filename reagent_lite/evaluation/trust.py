"""Verdicts on estimates; without torch, so that a server may draw charts."""

from enum import StrEnum


class Verdict(StrEnum):
    """Use of an estimate: its interval is trustworthy, it only supports other estimates, or neither."""

    TRUSTWORTHY = "trustworthy"
    SUPPORT = "support only"
    DO_NOT_USE = "do not use"

    @property
    def severity(self) -> int:
        """0 for trustworthy, larger for worse verdicts."""
        return [*Verdict].index(self)
