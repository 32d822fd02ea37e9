"""Which episodes are scored: all machines agree on the same ones, however the rows are divided among them.

1 candidates   own eval episodes; without eval data, a share of the own training episodes, chosen by hash
2 exchange     each shard sends its candidates and its training episodes: which candidates are trained on anywhere, have
               rows that cannot be scored, or are on several machines
3 draw         the first max_episodes of those that are left, in an order that depends on seed and mdp_id alone
4 rows         own rows of the drawn episodes, divided among the processes of the machine

Machines exchange hashes of names and digests, at most 32 bytes an episode; rows are read after the draw.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.repetitions import choices_hashes, hashes_of
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.errors import counted
from reagent_lite.evaluation.page import held_out

Hashes = NDArray[np.uint64]

# most at once: some 30 MB; longer blocks are slower
_DIGEST_ROWS = 1 << 16
_DIGEST_VALUES = 1 << 22
_EVAL_DATA = 1 << 32  # no number of a shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Logged rows to fit to and to score.

    Attributes:
        train: this machine's training data.
        held_out: its eval data, or None where a share of `train` is scored.
        same: whether the eval data of all machines are their training data.
        shards: which process reads which rows.
    """

    train: TrainingCopy
    held_out: TrainingCopy | None
    same: bool
    shards: Shards

    @property
    def scored(self) -> TrainingCopy:
        """The rows of which some are scored."""
        return self.train if self.held_out is None else self.held_out

    def hashes(self, copy: TrainingCopy) -> Hashes:
        """Returns the hash of each episode of this shard's training or eval data, [episodes]: that of its mdp_id.

        A row without mdp_id is an episode of its own, whose hash is that of its number and of the number of the shard:
        row 7 of another machine is another row, as is row 7 of eval data that are not the training data.
        """
        place = self.shards.own + (_EVAL_DATA if copy is self.held_out and not self.same else 0)
        hashes = np.array(copy.episode_hash, np.uint64)
        nameless = copy.counts.get("rows_without_mdp_id", 0)
        if nameless and place:
            hashes[-nameless:] = mix(hashes[-nameless:] ^ np.uint64(place))  # they come last in a copy
        return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What is scored, and this process's part of it.

    Attributes:
        hashes: [n] of the episodes that are scored, of all machines; ascending, on every rank.
        numbers: [R] row numbers in `copy` that this process scores, in its order.
        episode: [R] int64, a code per row, the same for an episode on every machine.
        sequence: [R] int64, the row's place in its episode among all machines' rows of it.
        notes: sentences on what is not scored, the same on every rank.
    """

    hashes: Hashes
    numbers: NDArray[np.int64]
    episode: NDArray[np.int64]
    sequence: NDArray[np.int64]
    notes: tuple[str, ...]


def scored_episodes(sides: Sides, settings: EvaluationConfig, seed: int, *, few: bool = False) -> Scored:
    """Returns the episodes that are scored, and this rank's rows of them; every rank calls it.

    Whole episodes are scored, and models are fitted to others: all eval episodes that no machine has in its training
    data; of those that one has, and of the training data where there is no eval data, about held_out_share by hash.
    Episodes with an unknown action are left out whole: without one row the weights of all later ones are wrong.
    Episodes with an aggregated row are left out as well, as the actions inside it are unknown. An episode that
    several machines have is scored once; where each has other rows of it, all of them are scored.

    Args:
        sides: training and eval data.
        settings: the settings of the evaluation.
        seed: seed of the draw where there are more than max_episodes.
        few: whether at least one episode is scored, and one fitted to, whatever the hashes; for a log on one machine.
    """
    shards = sides.shards
    copy = sides.scored
    share = settings.held_out_share if sides.held_out is None else 1.0
    own = _Candidates.of(sides, 1.0 if few else share)
    known = _exchange(own, np.unique(sides.hashes(sides.train)), shards)
    left = ~known.trained_on | held_out(own.hashes, settings.held_out_share)
    notes = _left_out(own, known, left, shards)
    left &= ~known.faulty
    if few:
        _leave_one(own.hashes, left, ~known.faulty)
    chosen, drawn_of = _draw(own.hashes[left & ~known.elsewhere], settings.max_episodes, seed, shards)
    mine = np.zeros(len(copy.episode_hash), np.bool_)
    mine[own.numbers] = np.isin(own.hashes, chosen) & ~known.copied
    numbers = shards.part(np.flatnonzero(mine[copy.episode]))
    codes = sides.hashes(copy).view(np.int64)
    return Scored(
        hashes=chosen,
        numbers=numbers,
        episode=codes[copy.episode[numbers]],
        sequence=np.asarray(copy.sequence[numbers], np.int64),
        notes=(*notes, *drawn_of),
    )


def _leave_one(hashes: Hashes, scored: NDArray[np.bool_], usable: NDArray[np.bool_]) -> None:
    """Moves an episode to the side that has none, if the other has several."""
    if not scored.any() and usable.any():
        scored[np.flatnonzero(usable)[hashes[usable].argmin()]] = True
    if scored[usable].all() and scored.sum() > 1:
        scored[np.flatnonzero(usable)[hashes[usable].argmax()]] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """A shard's episodes that may be scored, by ascending hash.

    Attributes:
        numbers: [E] in its copy.
        hashes: [E].
        digest: [E] uint64, equal for equal rows, states and candidates too; 0 where there is one shard only.
        unknown: [E] whether a row has no action.
        summed: [E] whether a row spans several steps.
    """

    numbers: NDArray[np.int64]
    hashes: Hashes
    digest: Hashes
    unknown: NDArray[np.bool_]
    summed: NDArray[np.bool_]

    @classmethod
    def of(cls, sides: Sides, share: float) -> "_Candidates":
        copy = sides.scored
        hashes = sides.hashes(copy)
        count = len(hashes)
        unknown = np.zeros(count, np.bool_)
        summed = np.zeros(count, np.bool_)
        unknown[copy.episode[np.asarray(copy.action) < 0]] = True
        summed[copy.episode[np.asarray(copy.step) > 1]] = True
        numbers = np.argsort(hashes)
        if share < 1:
            numbers = numbers[held_out(hashes[numbers], share)]
        wanted = np.zeros(count, np.bool_)
        wanted[numbers] = sides.shards.several
        return cls(
            numbers=numbers,
            hashes=hashes[numbers],
            digest=episode_digests(copy, wanted)[numbers],
            unknown=unknown[numbers],
            summed=summed[numbers],
        )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What all machines know about a shard's candidates, [E] bool each.

    Attributes:
        trained_on: some machine has the episode in its training data.
        faulty: some machine has a row of it that cannot be scored.
        elsewhere: an earlier shard has the episode too, and counts it.
        copied: whether another shard has the same rows of it, and scores them.
    """

    trained_on: NDArray[np.bool_]
    faulty: NDArray[np.bool_]
    elsewhere: NDArray[np.bool_]
    copied: NDArray[np.bool_]


def _exchange(own: _Candidates, trained_on: Hashes, shards: Shards) -> _Facts:
    """Returns what is known about this shard's candidates, as one shard after the other sends what it has."""
    group = shards.group
    found = _Facts(*np.zeros((4, len(own.hashes)), np.bool_))
    for shard, reader in enumerate(_first_readers(shards)):
        sent = np.stack((own.hashes, own.digest, own.unknown | own.summed)).tobytes()
        candidates, trained = (
            np.frombuffer(group.broadcast_bytes(data if group.rank == reader else None, reader), np.uint64)
            for data in (sent, trained_on.tobytes())
        )
        found.trained_on[:] |= _find(trained, own.hashes) >= 0
        hashes, digest, faulty = candidates.reshape(3, -1)
        place = _find(hashes, own.hashes)
        (too,) = np.nonzero(place >= 0)
        found.faulty[too] |= faulty[place[too]] > 0
        if shard < shards.own:
            found.elsewhere[too] = True
            found.copied[too] |= digest[place[too]] == own.digest[too]
    return found


def _find(ascending: Hashes, hashes: Hashes) -> NDArray[np.int64]:
    """Returns the place of each hash, [n], among ascending ones; -1 where it is none of them."""
    if not len(ascending):
        return np.full(len(hashes), -1, np.int64)
    places = np.searchsorted(ascending, hashes).clip(max=len(ascending) - 1)
    return np.where(ascending[places] == hashes, places, -1)


def _draw(hashes: Hashes, most: int, seed: int, shards: Shards) -> tuple[Hashes, list[str]]:
    """Returns at most so many of all shards' hashes, ascending: the first ones in an order that the seed mixes.

    The first of all are among the first of each shard, so that no more than these travel.
    """
    group = shards.group
    count = sum(shards.counts(len(hashes)))
    proposed = drawn(hashes, most, seed).tobytes()
    every = [group.broadcast_bytes(proposed if group.rank == rank else None, rank) for rank in _first_readers(shards)]
    notes = []
    if count > most:
        notes.append(f"{most:,} of {count:,} episodes are scored (evaluation.max_episodes)")
    elif shards.several:
        of = f"of {len(every)} machines"
        notes.append(f"{counted(count, f'episode {of} is', f'episodes {of} are')} scored")
    return np.sort(drawn(np.frombuffer(b"".join(every), np.uint64), most, seed)), notes


def spread(numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Returns at most so many of the numbers, evenly spread over them."""
    return numbers if most >= len(numbers) else numbers[np.linspace(0, len(numbers) - 1, most).astype(np.int64)]


def drawn(hashes: Hashes, most: int, seed: int) -> Hashes:
    """Returns at most so many hashes: of more the first ones in an order that the seed mixes."""
    if len(hashes) <= most:
        return hashes
    return hashes[np.argsort(mix(hashes ^ mix(np.array([seed], np.uint64))), kind="stable")[:most]]


def _first_readers(shards: Shards) -> list[int]:
    return [shards.of_rank.index(shard) for shard in range(max(shards.of_rank) + 1)]


def _left_out(own: _Candidates, known: _Facts, left: NDArray[np.bool_], shards: Shards) -> list[str]:
    """Returns sentences on episodes that their rows keep from being scored, and on those that several machines have."""
    unknown, summed, shared = (
        sum(shards.counts(int((left & some).sum())))
        for some in (own.unknown & ~known.elsewhere, own.summed & ~known.elsewhere, known.elsewhere & ~known.faulty)
    )
    notes = []
    if unknown:
        notes.append(f"not scored: {counted(unknown, 'episode')} with an unknown action")
    if summed:
        notes.append(
            f"not scored: {counted(summed, 'episode')} with rows that span several steps; give eval_data_path of a "
            "timeline with steps 1"
        )
    if shared:
        notes.append(
            f"{counted(shared, 'time')} a machine has rows of an episode that an earlier one has too; each episode "
            "counts once"
        )
    return notes


def episode_digests(copy: TrainingCopy, wanted: NDArray[np.bool_]) -> Hashes:
    """Returns a number per episode, [episodes], that identifies its rows: what was seen, done, possible, earned.

    The order of rows, of features and of files does not matter, nor do features that no row of the episode has.

    Args:
        copy: training or eval data.
        wanted: [episodes], whose number is asked for; the others' is 0.
    """
    digests = np.zeros(len(wanted), np.uint64)
    if not wanted.any():
        return digests
    choices = choices_hashes(copy)
    size = min(_DIGEST_ROWS, max(_DIGEST_VALUES // max(len(copy.state_ids), 1), 1))
    for start in range(0, len(copy), size):
        rows = start + np.flatnonzero(wanted[copy.episode[start : start + size]])
        row = hashes_of(copy.state_ids, copy.state[rows], np.ones(len(rows), np.int64))
        row = mix(row ^ np.asarray(copy.sequence[rows], np.int64).view(np.uint64))
        for column in (copy.action[rows], copy.reward[rows], copy.propensity[rows]):
            row = mix(row ^ np.ascontiguousarray(column).view(np.uint32).astype(np.uint64))
        if copy.parametric:
            row = mix(row ^ choices[copy.actions_list[rows]])
        np.add.at(digests, copy.episode[rows], row)
        copy.release()
    return digests
