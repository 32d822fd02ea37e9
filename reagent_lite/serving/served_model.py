"""The served model, and its replacement by a newer one."""

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
    """The verified model that decides at present.

    Args:
        folder: the model; it is read again while its files change, as during a copy.
        items: path of an item table in place of the model's own; read again when it changes.
        choices: kind of choices that every model must have, that of the log; None: the kind of the first model.

    Attributes:
        bundle: the model.
        version: sha256 of its manifest.
        swapped, refused: numbers of newer models and item tables that were accepted, and refused.
    """

    def __init__(self, folder: str, items: str | None = None, choices: ChoiceKind | None = None) -> None:
        self._folder = Path(folder).expanduser()
        self._items = items
        self._choices = choices
        self._loaded_identity = self._identity()
        self.swapped = self.refused = 0
        self._serve(self._load_first())

    @property
    def versions(self) -> dict[str, str]:
        """Hashes of the model and, if it has one, of its item table, as in answers and in the log."""
        items = {} if self.bundle.items is None else {"items": self.bundle.items.sha256}
        return {"model": self.version, **items}

    async def poll(self) -> None:
        """Loads a new model from the folder; a model that fails its check is refused with a warning."""
        identity = self._identity()
        if identity == self._loaded_identity:
            return
        self._loaded_identity = identity
        try:
            bundle = await asyncio.to_thread(self._load)
        except (BundleError, DataError) as error:
            self.refused += 1
            machine_logger.warning(f"{self} stays, the new one is refused:\n{error}")
            return
        before = str(self)
        self._serve(bundle)
        if str(self) == before:
            return
        self.swapped += 1
        machine_logger.info(f"{self} in the place of {before}")

    def __str__(self) -> str:
        return " with ".join(f"{name} {version[:12]}" for name, version in self.versions.items())

    def _load_first(self) -> Bundle:
        """Returns the model in the folder; tries again until it is valid or its files stop changing."""
        while True:
            try:
                return self._load()
            except (BundleError, DataError):
                time.sleep(_SETTLED_SECONDS)
                before = self._loaded_identity
                self._loaded_identity = self._identity()
                if self._loaded_identity == before:
                    raise

    def _load(self) -> Bundle:
        bundle = load_bundle(self._folder, threads=1)
        if self._choices not in (None, bundle.choices):
            expected = f"a model that chooses among {self._choices}, as the log"
            todo = "Start another server for it"
            raise BundleError(Problem(str(self._folder), expected, f"one for {bundle.choices}", todo))
        return with_items_of(bundle, self._items)

    def _serve(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = hashlib.sha256(canonical(bundle.manifest)).hexdigest()
        self._choices = bundle.choices

    def _identity(self) -> tuple[list[tuple[int, ...]], tuple[InputFile, ...]]:
        """Returns the identity of all files; it changes while a model is copied file by file."""
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
