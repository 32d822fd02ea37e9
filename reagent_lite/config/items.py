"""`items` and `item_id`: the table of the items that a log names by id."""

from typing import Annotated, Final

from pydantic import Field

ITEM_ID: Final = "item_id"
Items = Annotated[
    str | None,
    Field(
        description="Table of the items that actions name by id: a file, folder or URL of any format that a log may "
        "have, with a row for each item, a column of ids, and in each further column a feature, a number or a text for "
        "every item. Absent: the log has the features of its candidates in every row."
    ),
]
Name = Annotated[str, Field(min_length=1)]
ItemId = Annotated[Name, Field(description="Name of the item table's column of ids.")]
NewerItems = Annotated[
    str | None,
    Field(
        description="Item table in the place of the model's own, such as a newer one, with every feature that the "
        "model reads; the server reads it again when it changes. Absent: the model's own."
    ),
]
