"""Check machines before a run: python -m workflows.doctor --config x.json --node_index n, on each of them.

config ─► this machine alone ─► all machines together ─► table on standard error, JSON line on standard output
"""

import os
import sys

if not __package__:  # python workflows/doctor.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import contextlib

from reagent_lite.cli import add_config, add_node_index, exit_code
from reagent_lite.doctor.checks import show, summary
from reagent_lite.tasks.doctor import examine
from reagent_lite.tasks.train import WORKFLOWS

_EPILOG = """\
Run it on every machine at once, with the arguments of the run. Machines meet through a file next to that of
init_method, so that a run with the same file is not disturbed; a tcp:// port is used directly.

exit codes:
  0 nothing failed
  2 something failed on this machine
  3 the machines do not meet, cannot reach each other or do not fit together

standard output ends with one JSON line: ok, counts, node, rows (name, state, found, todo)

examples:
  python -m workflows.doctor --config x.json --node_index 0
  python -m workflows.doctor --config x.json --alone
"""


def main(arguments: list[str] | None = None) -> int:
    """Checks and reports; returns the exit code."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        rows, together, node = examine(options)
        title = f"doctor: node {node.index} of {node.count}" if node is not None else "doctor"
        show(title, [*rows, *together])
    print(summary([*rows, *together], node=None if node is None else node.index), flush=True)
    if any(row.state == "FAILED" for row in together):
        return 3
    return 2 if any(row.state == "FAILED" for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workflows.doctor",
        description="Check this machine and the machines together before a training run, and give advice.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser, required=True)
    add_node_index(parser)
    parser.add_argument(
        "--workflow", choices=list(WORKFLOWS), help="the workflow of the config; absent: derived from the config"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds to wait for the other machines, and for their files to appear (default: 60)",
    )
    parser.add_argument("--alone", action="store_true", help="check this machine only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
