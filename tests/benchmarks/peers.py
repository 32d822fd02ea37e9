"""Other people's packages, in environments of their own under outputs/, made where they are absent."""

import subprocess
import sys
import venv
from pathlib import Path


def interpreter(name: str, *packages: str) -> str | None:
    """Returns the Python of an environment that has the packages, or None where they cannot be had, which is said."""
    folder = Path("outputs/peers", name)
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=False).returncode:
            print(f"{name} could not be installed: left out", file=sys.stderr)
            return None
        ready.touch()
    return str(python)


def printed_number(python: str, code: str) -> float:
    """Returns the number that a program of the environment prints last."""
    return float(subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])
