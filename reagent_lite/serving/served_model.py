"""The served model, and how a newer one replaces it."""

import asyncio
import hashlib
import time
from pathlib import Path

from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export import Bundle, load_bundle
from reagent_lite.manifest import canonical

_SETTLED_SECONDS = 1.0


class ServedModel:
    """The verified model that decides now.

    Args:
        folder: the model; while its files change, as it is copied or replaced, it is tried again.
        parametric: whether decisions of the log are among candidates; None: those of the model.

    Attributes:
        bundle: the model.
        version: sha256 of its manifest.
        swapped, refused: number of newer models that were taken, and refused, so far.
    """

    def __init__(self, folder: str, parametric: bool | None = None) -> None:
        self._folder = Path(folder).expanduser()
        self._parametric = parametric
        self._seen = self._identity()
        self.swapped = self.refused = 0
        self._take(self._whole())

    async def poll(self) -> None:
        """Loads a new model from the folder; one that fails its check is logged and refused."""
        identity = self._identity()
        if identity == self._seen:
            return
        self._seen = identity
        try:
            bundle = await asyncio.to_thread(self._load)
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

    def _whole(self) -> Bundle:
        """Returns the model of the folder once its files have not changed for a moment, or as soon as it is right."""
        while True:
            try:
                return self._load()
            except BundleError:
                time.sleep(_SETTLED_SECONDS)
                before = self._seen
                self._seen = self._identity()
                if self._seen == before:
                    raise

    def _load(self) -> Bundle:
        bundle = load_bundle(self._folder, threads=1)
        if self._parametric in (None, bundle.parametric):
            return bundle
        expected = f"a model of {'parametric_dqn' if self._parametric else 'dqn'}, as the log"
        raise BundleError(Problem(str(self._folder), expected, bundle.workflow, "Start another server for it"))

    def _take(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = hashlib.sha256(canonical(bundle.manifest)).hexdigest()
        self._parametric = bundle.parametric

    def _identity(self) -> list[tuple[int, ...]]:
        """Identifies all files, so that a model which is copied file by file is tried again until it is whole."""
        try:
            files = [file.stat() for file in sorted(self._folder.iterdir())]
        except OSError:
            return []
        return [(entry.st_dev, entry.st_ino, entry.st_mtime_ns, entry.st_size) for entry in files]
