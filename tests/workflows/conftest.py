"""The fixtures of oracles/runs.py."""

from oracles.runs import run, small

__all__ = ["run", "small"]
