"""Replaces the item table that a model was exported with by a newer one."""

from reagent_lite.data.rows.item_files import read_items
from reagent_lite.errors import BundleError, Problem, raise_any
from reagent_lite.export.bundle import Bundle


def with_items_of(bundle: Bundle, path: str | None) -> Bundle:
    """Returns the model with the item table at a path; with None, the model itself.

    Raises:
        DataError: the table cannot be read.
        BundleError: the model has no items, the table lacks a feature that the model reads, or a feature is a text in
            one and a number in the other.
    """
    if path is None:
        return bundle
    if bundle.items is None:
        todo = "Leave items out, and describe candidates by their features"
        raise BundleError(Problem("items", "nothing, as the model was trained without data.items", path, todo))
    items = read_items(path, bundle.item_id, bundle.ids_of_log)
    problems = []
    for feature in bundle.action_feature_ids:
        expected = "strings" if str(feature) in bundle.levels["action"] else "numbers"
        got = "strings" if feature in items.texts else "numbers"
        if feature in items.feature_ids and got != expected:
            problems.append(Problem(f"{path}: {feature}", f"{expected}, which the model reads", got))
    raise_any(problems, BundleError)
    return bundle.with_items(items, path)
