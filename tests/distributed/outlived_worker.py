"""One rank that leaves its group while a wrapped module still lives, as an error's frames keep it."""

import gc
import sys

import torch
from torch import nn

from reagent_lite.distributed.group import Group, Place, joined


def stepped(group: Group) -> nn.Module:
    """Returns a wrapped module after a backward pass."""
    wrapped = group.wrap(nn.Linear(1, 1))
    wrapped(torch.ones(1, 1)).sum().backward()
    return wrapped


def main() -> None:
    """Python's lock is not offered to torch's thread, which has still to let go of what it averaged."""
    place = Place.read()
    assert place is not None
    with joined(place, torch.device("cpu"), 60) as group:
        gc.freeze()  # collecting takes long enough for the thread
        sys.setswitchinterval(60)
        wrapped = stepped(group)
    del wrapped
    gc.collect()
    print("ended")


if __name__ == "__main__":
    main()
