"""The command `reagent-lite`, the same as `python -m workflows`: its first argument names the workflow."""

import ast
import os
import pkgutil
import runpy
import sys
from pathlib import Path

import workflows
from reagent_lite.errors import suggest_nearest

_MODULES = (module.name for module in pkgutil.iter_modules(workflows.__path__))
_COMMANDS = sorted(name for name in _MODULES if not name.startswith("_"))


def _purpose(name: str) -> str:
    """Returns the purpose of a command, from its module's docstring; the module is not imported."""
    source = (Path(workflows.__path__[0]) / f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition(":")[0]


def main() -> int:
    """Runs `python -m workflows.NAME` in this process, with the arguments after the name."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(
            "usage: reagent-lite COMMAND [arguments]\n\n"
            + "".join(f"  {name:16}{_purpose(name)}\n" for name in _COMMANDS)
            + "\n"
            "reagent-lite COMMAND --help explains a command, which is the same as python -m workflows.COMMAND."
        )
        return 0
    if name not in _COMMANDS:
        near = suggest_nearest(name, _COMMANDS, "did you mean {}?", "see reagent-lite --help")
        print(f"reagent-lite: unknown command {name}; {near}", file=sys.stderr)
        return 2
    sys.argv[1:] = arguments
    if not sys.flags.safe_path:  # like python -m: the working folder may have modules with environments and networks
        sys.path.insert(0, os.getcwd())
    runpy.run_module(f"workflows.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
