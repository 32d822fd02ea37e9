"""A newer item table in the place of the one that a model was exported with."""

from reagent_lite.data.rows.items import read_items
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import Bundle


def with_items_of(bundle: Bundle, path: str | None) -> Bundle:
    """Returns the model with the item table at a path, or as it is for None.

    Raises:
        DataError: see `read_items`.
        BundleError: the model has no items, or reads a feature that the table lacks.
    """
    if path is None:
        return bundle
    if bundle.items is None:
        todo = "Leave items out, and give candidates by their features"
        raise BundleError(Problem("items", "nothing, as the model was trained without data.items", path, todo))
    return bundle.with_items(read_items(path, bundle.item_id), path)
