"""The served model, and how a newer one replaces it."""

import asyncio
import hashlib
import time
from pathlib import Path

from reagent_lite.console import machine_logger
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.stage import data_files
from reagent_lite.errors import BundleError, DataError, Problem
from reagent_lite.export import Bundle, load_bundle
from reagent_lite.export.bundle import ChoiceKind
from reagent_lite.export.newer_items import with_items_of
from reagent_lite.manifest import canonical

_SETTLED_SECONDS = 1.0


class ServedModel:
    """The verified model that decides now.

    Args:
        folder: the model; while its files change, as it is copied or replaced, it is tried again.
        items: path of an item table in place of the model's own; read again when it changes.
        choices: kind of the decisions of the log; None: that of the model.

    Attributes:
        bundle: the model.
        version: sha256 of its manifest.
        swapped, refused: number of newer models and item tables that were taken, and refused, so far.
    """

    def __init__(self, folder: str, items: str | None = None, choices: ChoiceKind | None = None) -> None:
        self._folder = Path(folder).expanduser()
        self._items = items
        self._choices = choices
        self._seen = self._identity()
        self.swapped = self.refused = 0
        self._take(self._whole())

    @property
    def items_hash(self) -> str | None:
        """Hash of the item table; None without one."""
        return None if self.bundle.items is None else self.bundle.items.sha256

    async def poll(self) -> None:
        """Loads a new model from the folder; one that fails its check is logged and refused."""
        identity = self._identity()
        if identity == self._seen:
            return
        self._seen = identity
        try:
            bundle = await asyncio.to_thread(self._load)
        except (BundleError, DataError) as error:
            self.refused += 1
            machine_logger.warning(f"{self} stays, the new one is refused:\n{error}")
            return
        before = str(self)
        self._take(bundle)
        if str(self) == before:
            return
        self.swapped += 1
        machine_logger.info(f"{self} in the place of {before}")

    def __str__(self) -> str:
        items = "" if self.items_hash is None else f" with items {self.items_hash[:12]}"
        return f"model {self.version[:12]}{items}"

    def _whole(self) -> Bundle:
        """Returns the model of the folder once its files have not changed for a moment, or as soon as it is right."""
        while True:
            try:
                return self._load()
            except (BundleError, DataError):
                time.sleep(_SETTLED_SECONDS)
                before = self._seen
                self._seen = self._identity()
                if self._seen == before:
                    raise

    def _load(self) -> Bundle:
        bundle = load_bundle(self._folder, threads=1)
        if self._choices not in (None, bundle.choices):
            expected, got = (f"a model that chooses among {kind}" for kind in (self._choices, bundle.choices))
            raise BundleError(Problem(str(self._folder), f"{expected}, as the log", got, "Start another server for it"))
        return with_items_of(bundle, self._items)

    def _take(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = hashlib.sha256(canonical(bundle.manifest)).hexdigest()
        self._choices = bundle.choices

    def _identity(self) -> tuple[list[tuple[int, ...]], tuple[InputFile, ...]]:
        """Identifies all files, so that a model which is copied file by file is tried again until it is whole."""
        try:
            files = [file.stat() for file in sorted(self._folder.iterdir())]
        except OSError:
            files = []
        model: list[tuple[int, ...]] = [
            (entry.st_dev, entry.st_ino, entry.st_mtime_ns, entry.st_size) for entry in files
        ]
        try:
            return model, () if self._items is None else data_files(self._items)
        except DataError:
            return model, ()
