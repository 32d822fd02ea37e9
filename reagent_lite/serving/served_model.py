"""The served model, and its replacement by a newer one."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from reagent_lite.config.column_names import names_of
from reagent_lite.console import machine_logger
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.logs import Log
from reagent_lite.errors import BundleError, DataError, Problem, join_names, raise_any
from reagent_lite.export import Bundle, load_bundle
from reagent_lite.export.exploration import EXPLORE, lack_of_exploration
from reagent_lite.export.newer_items import with_items_of
from reagent_lite.manifest import canonical

_SETTLED_SECONDS = 1.0

Interface = dict[str, tuple[str, ...]]
"""Names that a model's clients send and get, by their kind; see `interface_of`."""


class ServedModel:
    """The verified model that decides at present.

    Args:
        folder: the model; it is read again while its files change, as during a copy.
        items: path of an item table in place of the model's own; read again when it changes.
        interface: interface that every model must have; None: that of the first model.

    Attributes:
        bundle: the model.
        interface: its interface.
        version: sha256 of its manifest.
        swapped, refused: numbers of newer models and item tables that were accepted, and refused.
        refusal: why the newest one was refused; "" if it is served.
    """

    def __init__(self, folder: str, items: str | None = None, interface: Interface | None = None) -> None:
        self._folder = Path(folder).expanduser()
        self._items = items
        self.interface: Interface = interface or {}
        self._loaded_identity = self._identity_before = self._identity()
        self.swapped = self.refused = 0
        self.refusal = ""
        self._serve(self._load_first())

    @property
    def versions(self) -> dict[str, str]:
        """Hashes of the model and, if it has one, of its item table, as in answers and in the log."""
        items = {} if self.bundle.items is None else {"items": self.bundle.items.sha256}
        return {"model": self.version, **items}

    async def poll(self) -> None:
        """Loads a new model or item table whose files are as at the poll before, since part of a table is a table too.

        A model that fails its check is refused with a warning.
        """
        identity = self._identity()
        is_changing = identity != self._identity_before
        self._identity_before = identity
        if is_changing or identity == self._loaded_identity:
            return
        self._loaded_identity = identity
        try:
            bundle = await asyncio.to_thread(self._load)
        except (BundleError, DataError) as error:
            self.refused += 1
            self.refusal = str(error)
            machine_logger.warning(f"{self} stays, the new one is refused:\n{error}")
            return
        before = str(self)
        self.refusal = ""
        self._serve(bundle)
        if str(self) == before:
            return
        self.swapped += 1
        machine_logger.info(f"{self} in the place of {before}")
        self.warn_if_certain()

    def take_over(self, other: "ServedModel") -> None:
        """Serves the model of another object from now on."""
        self._serve(other.bundle)

    def follow(self, folder: str) -> None:
        """Serves newer models of another folder from now on; the next polls load what is there."""
        self._folder = Path(folder).expanduser()

    def warn_if_certain(self) -> None:
        """Warns of a model whose log cannot evaluate another policy."""
        if lack := lack_of_exploration(self.bundle.certain_share):
            machine_logger.warning(f"{self} {lack}. One that explores has {EXPLORE}")

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
        interface = interface_of(bundle)
        todo = "Export a model with the same, or stop the server and start it with this one"
        problems = [
            Problem(f"{self._folder}: {name}", "those of the served model", _difference(names, interface[name]), todo)
            for name, names in self.interface.items()
            if names and interface[name] != names
        ]
        raise_any(problems, BundleError)
        return with_items_of(bundle, self._items)

    def _serve(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = hashlib.sha256(canonical(bundle.manifest)).hexdigest()
        self.interface = interface_of(bundle)

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
            return model, () if self._items is None else Log(self._items).files
        except DataError:
            return model, ()


def interface_of(bundle: Bundle) -> Interface:
    """Returns what a model's clients know: kind of choices, actions, features, and names of the training log."""
    candidates = "action" if bundle.choices == "candidates" else ""
    columns = [f"{name} for {field}" for field, source in bundle.columns.items() for name in names_of(source)]
    return {
        "choices": (bundle.choices,),
        "actions": bundle.action_names,
        "state features": _features(bundle, "state"),
        "features of candidates": _features(bundle, candidates),
        "data.columns": tuple(sorted(columns)),
    }


def _features(bundle: Bundle, side: str) -> tuple[str, ...]:
    if not side:
        return ()
    if side == "state" and bundle.image_shape is not None:
        return (f"images of {' x '.join(map(str, bundle.image_shape))}",)
    kinds = dict.fromkeys(bundle.levels[side], " (strings)") | {
        name: f" ({feature.expected})" for name, feature in bundle.id_features[side].items()
    }
    return tuple(sorted(f"{feature}{kinds.get(feature, '')}" for feature in bundle.features[side]))


def _difference(before: Sequence[str], after: Sequence[str]) -> str:
    missing = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    parts = [f"{join_names(names)} {word}" for names, word in ((missing, "missing"), (new, "new")) if names]
    return ", ".join(parts) or "another order"
