"""Replaces the item table that a model was exported with by a newer one."""

from reagent_lite.data.rows.items import read_items
from reagent_lite.errors import BundleError, Problem, raise_any
from reagent_lite.export.bundle import Bundle


def with_items_of(bundle: Bundle, path: str | None) -> Bundle:
    """Returns the model with the item table at a path; with None, the model itself.

    Raises:
        DataError: see `read_items`.
        BundleError: the model has no items, the table lacks a feature that the model reads, or a feature is a text in
            one and a number in the other.
    """
    if path is None:
        return bundle
    if bundle.items is None:
        todo = "Leave items out, and describe candidates by their features"
        raise BundleError(Problem("items", "nothing, as the model was trained without data.items", path, todo))
    items = read_items(path, bundle.item_id)
    texts = bundle.levels["action"]
    expected = {False: "numbers", True: "texts"}
    raise_any(
        [
            Problem(
                f"{path}: {feature}", f"{expected[str(feature) in texts]}, which the model reads", expected[is_text]
            )
            for feature in bundle.action_feature_ids
            if (is_text := feature in items.texts) != (str(feature) in texts) and feature in items.feature_ids
        ],
        BundleError,
    )
    return bundle.with_items(items, path)
