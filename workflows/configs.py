"""Copy the sample configs and the guides: python -m workflows.configs --copy DIR."""

import os
import sys

if not __package__:  # python workflows/configs.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import shutil
from pathlib import Path

from reagent_lite.cli import exit_code
from reagent_lite.console import logger
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import ConfigError, Problem, pluralize
from reagent_lite.shipped import find_shipped
from reagent_lite.whole_files import appearing_folder

_HIDDEN = shutil.ignore_patterns(".*", "__pycache__")  # training copies next to a log, compiled scripts


def main(arguments: list[str] | None = None) -> int:
    """Copies the configs, and in `docs` the guides, into a new folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workflows.configs", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--copy", required=True, type=Path, metavar="DIR", help="name of the new folder")
    target = parser.parse_args(arguments).copy.expanduser()
    return exit_code(lambda: _copy(target))


def _copy(target: Path) -> int:
    if target.exists():
        raise ConfigError(Problem("--copy", "a folder that does not exist yet", str(target), "Choose another name"))
    errors = disk_errors(str(target), "a folder that can be written", "Choose another folder")
    with errors, appearing_folder(target) as temporary:
        shutil.copytree(find_shipped("configs"), temporary, ignore=_HIDDEN, dirs_exist_ok=True)
        (temporary / "docs").mkdir()
        for page in find_shipped("docs").glob("*.md"):
            shutil.copy(page, temporary / "docs")
    logger.info(f"{pluralize(len([*target.rglob('*.json')]), 'config')} in {target}; see {target / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
