"""The system's clock of real processes, set by a test while they run; their monotonic clocks go on, as on a machine.

libfaketime 0.9.10 can leave monotonic clocks alone as well, but then refuses `time.sleep` of Python 3.11.
"""

import subprocess
from pathlib import Path


class MovedClock:
    """A clock that is some seconds off.

    Args:
        folder: where the preloaded library is built, and where it is kept how far the clock is off.

    Attributes:
        environment: variables of the processes that have the clock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        library = folder / "moved_clock.so"
        source = Path(__file__).with_name("moved_clock.c")
        subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, source], check=True)
        self._file = folder / "seconds"
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}
        self.move(0)

    def move(self, seconds: int) -> None:
        """Sets how many seconds the clock is ahead."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{seconds}\n")
        part.replace(self._file)
