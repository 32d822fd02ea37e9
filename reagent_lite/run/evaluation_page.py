"""The parts of the evaluation page that processes have scored, put together on rank 0.

rank 0: part ─┐
rank 1: part ─┼► sizes and order are agreed ─► one column at a time, each row to its place ─► page of all, on rank 0
rank 2: part ─┘
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.page import BY_CHOICE, EvaluationPage, padded


def gather_page(part: EvaluationPage, sequence: Tensor, group: Group) -> EvaluationPage | None:
    """Returns the page of all ranks' rows on rank 0, ordered by (episode, sequence), and None on the others.

    The result does not depend on how the rows were divided. Rank 0 holds the whole page beside its own part and, for a
    moment, one column of another rank's; the others hold their part.

    Args:
        part: this rank's rows; an episode has the same code on every rank.
        sequence: [N] int64, the place of each row of the part in its episode.
        group: all ranks; every one calls it.
    """
    if group.world_size == 1:
        return part
    sizes, num_choices = group.each(len(part)), max(group.each(part.mask.shape[1]))
    keys = [list(group.gather(key)) for key in (sequence, part.episode)]
    places = torch.split(_places(*map(torch.cat, keys)), list(sizes)) if group.is_first else ()
    columns = {}
    for field in fields(part):
        if field.name == "names":
            continue
        column = getattr(part, field.name)
        alike = padded(column, num_choices) if field.name in BY_CHOICE else column
        whole = _joined(group.gather(alike), places, sum(sizes))
        if whole is not None:
            columns[field.name] = whole
    return EvaluationPage(names=part.names, **columns) if group.is_first else None


def _places(sequence: Tensor, episode: Tensor) -> Tensor:
    """Returns the number of each row, [N], in the order of (episode, sequence)."""
    order = torch.from_numpy(np.lexsort((sequence.numpy(), episode.numpy())))
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _joined(parts: Iterator[Tensor], places: Sequence[Tensor], num_rows: int) -> Tensor | None:
    """Returns a column of so many rows, whose parts go to their places; None where there are no parts."""
    whole = None
    for values, place in zip(parts, places, strict=True):  # the parts first: elsewhere than on rank 0 it only sends
        if whole is None:
            whole = values.new_empty(num_rows, *values.shape[1:])
        whole[place] = values
    return whole
