"""The served model, and how a newer one replaces it."""

import asyncio
import hashlib
from pathlib import Path

from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export import Bundle, load_bundle
from reagent_lite.manifest import canonical


class ServedModel:
    """The verified model that decides now.

    Attributes:
        bundle: the model.
        version: sha256 of its manifest.
        swapped, refused: number of newer models that were taken, and refused, so far.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        self._seen = self._identity()
        self.swapped = self.refused = 0
        self._take(load_bundle(self._folder, threads=1))

    async def poll(self) -> None:
        """Loads a new model from the folder; one that fails its check is logged and refused."""
        identity = self._identity()
        if identity == self._seen:
            return
        self._seen = identity
        try:
            bundle = await asyncio.to_thread(load_bundle, self._folder, threads=1)
            if bundle.parametric != self.bundle.parametric:
                expected = f"a model of {self.bundle.workflow}, as the log"
                raise BundleError(Problem(str(self._folder), expected, bundle.workflow, "Start another server for it"))
        except BundleError as error:
            self.refused += 1
            machine_logger.warning(f"the model stays {self.version[:12]}, the new one is refused:\n{error}")
            return
        before = self.version
        self._take(bundle)
        if self.version == before:
            return
        self.swapped += 1
        machine_logger.info(f"model {self.version[:12]} in the place of {before[:12]}")

    def _take(self, bundle: Bundle) -> None:
        self.bundle, self.version = bundle, hashlib.sha256(canonical(bundle.manifest)).hexdigest()

    def _identity(self) -> list[tuple[int, ...]]:
        """Identifies all files, so that a model which is copied file by file is tried again until it is whole."""
        try:
            found = [file.stat() for file in sorted(self._folder.iterdir())]
        except OSError:
            return []
        return [(one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found]
