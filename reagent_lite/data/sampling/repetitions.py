"""Finds rows that are in the shards of two machines, and would count twice, and events that would be paired wrongly.

own rows ─► sample ─► samples of all shards ─► look-up among own rows ─► repeated rows by shard, the same on every rank

Two rows are the same if they have the same mdp_id, sequence_number, state, candidates, action, reward and propensity.
Machines that use the same mdp_ids for different episodes have rows with different values, and machines that each logged
a part of the same episodes have different sequence numbers: neither is a repetition. Transitions may be divided like
that, as each has its next state. Events may not, as each machine pairs its own: it would skip an event that another
machine has between two of them, or with addTerminalStateRow end an episode that goes on elsewhere.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.timeline_config import TimelineSection
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import Hashes, list_hashes, mix, row_hashes
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.errors import Problem, pluralize, raise_any

SAMPLED_ROWS = 1024
"""Largest number of rows of a shard that are looked up in the others: 32 KiB per machine."""

_BLOCK_ROWS = 1 << 18
_LISTS_AT_ONCE = 1 << 16
_VALUES_AT_ONCE = 1 << 22  # some 30 MB; longer blocks are slower


def require_own_rows(
    copy: TrainingCopy, shards: Shards, path: str, pairing: TimelineSection | None, *, repeats: bool
) -> None:
    """Checks that no shard repeats rows of another one, or lacks events of its episodes; every rank calls it.

    Args:
        copy: this machine's training or eval data.
        shards: which process reads which rows.
        path: the data's path, the same on all machines, for errors.
        pairing: the settings by which this machine has paired its events; None if its rows are transitions.
        repeats: whether a shard may repeat rows of another one.

    Raises:
        DataError: some do; raised on every rank.
    """
    if not shards.several:
        return
    group = shards.group
    sample = np.linspace(0, len(copy) - 1, min(SAMPLED_ROWS, len(copy))).astype(np.int64)
    choices = choices_hashes(copy) if copy.parametric else None
    episodes = copy.episode_hash[copy.episode[sample]]
    numbers = copy.sequence[sample].view(np.uint64)
    sent = np.stack((_names(copy, sample), _contents(copy, sample, choices), episodes, numbers)).tobytes()
    samples = [
        np.frombuffer(group.broadcast_bytes(sent if group.rank == reader else None, reader), np.uint64).reshape(4, -1)
        for reader in shards.first_readers
    ]
    repeated = [0] * len(samples)
    if shards.is_first and not repeats:
        repeated = _count_repeated(copy, samples, shards.own, choices)
    lacking = [0] * len(samples)
    if shards.is_first and pairing is not None:
        lacking = _lacking(copy, samples, made_ends=pairing.addTerminalStateRow)
    tables = [json.loads(text) for text in group.gather_text(json.dumps([repeated, lacking]))]
    repetitions, gaps = zip(*(tables[reader] for reader in shards.first_readers), strict=True)
    raise_any([*_problems(repetitions, samples, path), *_gaps(gaps, path)])


def _count_repeated(
    copy: TrainingCopy, samples: list[NDArray[np.uint64]], own_shard: int, choices: Hashes | None
) -> list[int]:
    """Returns for each shard how many rows of its sample this shard has too.

    The number is 0 if a row with the same mdp_id and sequence_number differs.
    """
    names = np.concatenate([sample[0] for sample in samples])
    contents: dict[int, set[int]] = defaultdict(set)
    for start in range(0, len(copy), _BLOCK_ROWS):
        rows = np.arange(start, min(start + _BLOCK_ROWS, len(copy)))
        own_names = _names(copy, rows)
        sampled = np.isin(own_names, names)
        own_contents = _contents(copy, rows[sampled], choices)
        for name, content in zip(own_names[sampled].tolist(), own_contents.tolist(), strict=True):
            contents[name].add(content)
        copy.release()
    repeated = []
    for sample in samples:
        equal = [contents[name] == {content} for name, content in sample[:2].T.tolist() if name in contents]
        repeated.append(len(equal) if all(equal) else 0)
    repeated[own_shard] = 0
    return repeated


def _lacking(copy: TrainingCopy, samples: list[NDArray[np.uint64]], *, made_ends: bool) -> list[int]:
    """Returns for each shard how many rows of its sample belong between two rows of an episode of this shard.

    With `made_ends` rows after the true end of an episode are counted as well. The number is 0 if this shard has rows
    with the same mdp_id and sequence_number: those are other episodes.
    """
    codes = np.concatenate([sample[2] for sample in samples])
    starts = range(0, len(copy.episode_hash), _BLOCK_ROWS)
    blocks = [
        np.flatnonzero(np.isin(copy.episode_hash[start : start + _BLOCK_ROWS], codes)) + start for start in starts
    ]
    shared = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
    numbers = shared.astype(copy.episode.dtype)  # a search for another type would convert all rows
    begins = np.searchsorted(copy.episode, numbers).tolist()
    ends = np.searchsorted(copy.episode, numbers, side="right").tolist()
    rows = {
        code: slice(begin, end)
        for code, begin, end in zip(copy.episode_hash[shared].tolist(), begins, ends, strict=True)
    }
    lacking = []
    for sample in samples:
        number = 0
        for code, sequence in zip(sample[2].tolist(), sample[3].view(np.int64).tolist(), strict=True):
            episode = rows.get(code, slice(0))
            ordered = copy.sequence[episode]
            later = np.searchsorted(ordered, sequence)
            if later < len(ordered) and ordered[later] == sequence:
                number = 0
                break
            ended = made_ends and later == len(ordered) > 0 and not copy.bootstrap[episode.stop - 1]
            number += int(0 < later < len(ordered) or ended)
        lacking.append(number)
    return lacking


def _gaps(tables: Sequence[list[int]], path: str) -> Iterator[Problem]:
    """Yields a problem for each shard of events that lacks events of its episodes; `tables` are those of `_lacking`."""
    for shard, table in enumerate(tables):
        for other, number in enumerate(table):
            if number:
                yield Problem(
                    f"{path} on node {shard}",
                    "whole episodes of events, as each node pairs its own",
                    f"episodes that lack {pluralize(number, 'event')} of node {other}, among those compared",
                    "Divide them by workflows.shard or data.shards_path; give different episodes different mdp_ids",
                )


def _problems(tables: Sequence[list[int]], samples: list[NDArray[np.uint64]], path: str) -> Iterator[Problem]:
    """Yields a problem for each shard that shares rows with an earlier one.

    Args:
        tables: for each shard, the result of `_count_repeated`.
        samples: the sample of each shard.
        path: the data's path.
    """
    for later in range(len(tables)):
        for earlier in range(later):
            sampled = later if tables[earlier][later] else earlier
            if repeated := tables[earlier][later] or tables[later][earlier]:
                compared = pluralize(samples[sampled].shape[1], "row")
                yield Problem(
                    f"{path} on node {later}",
                    "rows of its own, as data.layout is shards",
                    f"rows of node {earlier}: {repeated:,} of {compared} of node {sampled} that were compared",
                    "Give every node its own part (workflows.shard), or set data.layout to replicas",
                )


def _names(copy: TrainingCopy, rows: NDArray[np.int64]) -> Hashes:
    """Returns a hash of mdp_id and sequence_number of each row, [n]."""
    return row_hashes(copy.episode_hash[copy.episode[rows]], copy.sequence[rows], 0)


def _contents(copy: TrainingCopy, rows: NDArray[np.int64], choices: Hashes | None) -> Hashes:
    """Returns a hash of state, action, reward and propensity of each row, and of its candidates, [n]."""
    hashes = hashes_of(copy.state_ids, copy.state[rows], np.ones(len(rows), np.int64))
    if choices is not None:
        hashes = mix(hashes ^ choices[copy.actions_list[rows]])
    for column in (copy.action, copy.reward, copy.propensity):
        hashes = mix(hashes ^ np.ascontiguousarray(column[rows]).view(np.uint32).astype(np.uint64))
    return hashes


def choices_hashes(copy: TrainingCopy) -> Hashes:
    """Returns a hash of each list of candidates, [L]."""
    ends = copy.list_offsets[1:]
    hashes = np.zeros(len(ends), np.uint64)
    most = min(_LISTS_AT_ONCE, max(_VALUES_AT_ONCE // max(len(copy.action_ids), 1), 1))
    begin = 0
    while begin < len(ends):
        first = int(copy.list_offsets[begin])
        end = max(begin + 1, int(np.searchsorted(ends, first + most, side="right")))
        lengths = np.diff(copy.list_offsets[begin : end + 1])
        hashes[begin:end] = hashes_of(copy.action_ids, copy.candidates[first : int(ends[end - 1])], lengths)
        begin = end
    return hashes


def hashes_of(ids: tuple[int, ...], values: NDArray[np.float32], lengths: NDArray[np.int64]) -> Hashes:
    """Returns a hash of each run of rows, [n]; a state is a run of one row."""
    return list_hashes(Lists(lengths, FeatureMatrix(ids, values)))[0]
