"""`items` and `item_id`: the table of items that a log names by id."""

from typing import Annotated, Final, Literal

from pydantic import Field

from reagent_lite.config.section import NoEffect

ITEM_ID: Final = "item_id"
Items = Annotated[
    str | None,
    Field(
        description="Table of the items that actions name by id: a file, folder or URL in any format of a log, with a "
        "row for each item, a column of ids, and a column for each feature that has a number or a text for every item. "
        "Absent: every row of the log has the features of its candidates."
    ),
]
Name = Annotated[str, Field(min_length=1)]
ItemId = Annotated[Name, Field(description="Name of the item table's column of ids.")]
PossibleItems = Annotated[
    Literal["all"] | None,
    Field(
        description="all: a row that lists no possible actions offers every item of the table. Absent: it offers its "
        "action alone, and a log with such rows only is refused. A column with lists of ids is named in columns, as "
        "possible_actions."
    ),
]
WITHOUT_ITEMS: Final = NoEffect(
    lambda config: config.items is None, ("item_id", "possible_items"), "absent without items"
)
NewerItems = Annotated[
    str | None,
    Field(
        description="Item table in place of the model's own, such as a newer one, with every feature that the model "
        "reads; a server reads it again when it changes. Absent: the model's own."
    ),
]
