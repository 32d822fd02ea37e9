"""Other people's packages, in environments of their own under outputs/, made where they are absent."""

import subprocess
import sys
import venv
from pathlib import Path

_FOLDER = Path("outputs/peers")


def interpreter(name: str, *packages: str) -> str | None:
    """Returns the Python of an environment that has the packages, or None where they cannot be had, which is said."""
    folder = _FOLDER / name
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=False)
        if done.returncode:
            print(f"{name} could not be installed: left out", file=sys.stderr)
            return None
        ready.touch()
    return str(python)


def printed_number(python: str, code: str) -> float:
    """Returns the number that a program of the environment prints last."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.splitlines()[-1])
