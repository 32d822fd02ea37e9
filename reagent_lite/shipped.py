"""Folders outside of a run: those shipped with the package, and the cache of the user."""

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """Returns the folder for files that can be computed again: `reagent-lite` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "reagent-lite"


def find_shipped(name: str) -> Path:
    """Returns the shipped folder "kernels", "configs" or "docs": that of the checkout, else the installed one."""
    checkout = Path(__file__).resolve().parents[1] / name
    return checkout if checkout.is_dir() else Path(sys.prefix).resolve() / "share" / "reagent-lite" / name
