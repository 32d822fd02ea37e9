"""The draw of scored episodes: all machines agree on them, regardless of how rows are divided among machines.

1 candidates   this shard's eval episodes; without eval data, a share of its training episodes, chosen by hash
2 exchange     each shard broadcasts its candidates and its training episodes, so that all shards learn which candidates
               are trained on anywhere, have rows that cannot be scored, or are on several machines
3 draw         the first max_episodes of the remaining candidates, in an order that depends on seed and mdp_id alone
4 rows         this shard's rows of the drawn episodes, divided among the processes of the machine

Machines exchange hashes of names and digests, at most 32 bytes per episode; rows are read after the draw.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.data.copy.choice_hashes import choices_hashes, hashes_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.sampling.shards import Integer, Shards
from reagent_lite.distributed.group import Group
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.evaluation_rows import held_out

# largest block: about 30 MB; longer blocks are slower
_DIGEST_ROWS = 1 << 16
_DIGEST_VALUES = 1 << 22
FEWEST_TO_VALIDATE = 50
"""Fewest episodes besides the scored ones of which some are for validation."""
_VALIDATION_SHARE = 0.1
_FEWEST_VALIDATED = 10
_CHANCE_EPISODES = 3  # equal episodes of two logs that may be chance
_MOST_CHOICES = 20_000_000
"""Choices (rows times actions or candidates, times outcomes) up to which all episodes are scored by default."""
_ALWAYS_SCORED = 10_000
_EVAL_DATA = 1 << 32  # larger than every shard number
_CHOOSING = np.uint64(0x63686F6F73696E67)  # another split than those of scored episodes and of segments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalLogs:
    """Logged rows for fitting and for scoring.

    Attributes:
        train: this machine's training data.
        held_out: this machine's eval data, or None if a share of `train` is scored.
        same: whether the eval data of all machines are their training data.
        shards: assignment of rows to processes.
    """

    train: TrainingCopy
    held_out: TrainingCopy | None
    same: bool
    shards: Shards

    @property
    def scored(self) -> TrainingCopy:
        """The training copy that holds the scored episodes."""
        return self.train if self.held_out is None else self.held_out

    def hashes(self, copy: TrainingCopy) -> Hashes:
        """Returns the hash of the mdp_id of each episode of this shard's training or eval data, [episodes].

        A row without mdp_id is a separate episode. Its hash is that of its number and of the shard's number: row 7 of
        another machine is another row, as is row 7 of eval data that are not the training data.
        """
        salt = self.shards.own + (_EVAL_DATA if copy is self.held_out and not self.same else 0)
        hashes = np.array(copy.episode_hash, np.uint64)
        nameless = copy.counts.get("rows_without_mdp_id", 0)
        if nameless and salt:
            hashes[-nameless:] = mix(hashes[-nameless:] ^ np.uint64(salt))  # a copy has them after all others
        return hashes


@dataclass(frozen=True, kw_only=True)
class ScoredEpisodes:
    """Scored episodes of all machines, and this process's rows of them.

    Attributes:
        hashes: [n] hashes of the scored episodes of all machines, ascending; the same on every rank.
        numbers: [R] numbers of the rows that this process scores, in the order of the training copy.
        episode: [R] int64 code of each row's episode, the same on every machine.
        sequence: [R] int64 position of each row in its episode, among the rows of all machines.
        notes: sentences on episodes that are not scored, and on repeated ones, the same on every rank.
        repeats: whether training data have eval episodes under other mdp_ids.
        left_out: number of further episodes that could be scored, evaluation.max_episodes.
    """

    hashes: Hashes
    numbers: NDArray[np.int64]
    episode: NDArray[np.int64]
    sequence: NDArray[np.int64]
    notes: tuple[str, ...]
    repeats: bool
    left_out: int = 0

    @property
    def page_order(self) -> NDArray[np.int64]:
        """[R] numbers of the rows above in the order of a page, episode by episode."""
        return np.argsort(self.episode, kind="stable")

    def divide(
        self, sides: TrainEvalLogs, share: float | None, units: NDArray[np.int64] | None
    ) -> tuple["ScoredEpisodes", "ScoredEpisodes"]:
        """Returns the episodes that choose among runs, about `share` of them, and those that decide.

        Without a share both are all episodes. Every rank calls it.

        Args:
            sides: training and eval data.
            share: share of the episodes, or of the units.
            units: [episodes of the scored data] code of the unit of each, whose episodes stay together; None if each
                episode is a unit.
        """
        if share is None:
            return self, self
        drawn = self.episode if units is None else units[sides.scored.episode[self.numbers]]
        chooses = held_out(drawn.view(np.uint64) ^ _CHOOSING, share)
        return self._part(chooses, sides.shards.group), self._part(~chooses, sides.shards.group)

    def _part(self, kept: NDArray[np.bool_], group: Group) -> "ScoredEpisodes":
        episodes = np.unique(self.episode[kept].view(np.uint64))
        of_ranks = [
            group.broadcast_bytes(episodes.tobytes() if group.rank == rank else None, rank)
            for rank in range(group.world_size)
        ]
        hashes = np.unique(np.frombuffer(b"".join(of_ranks), np.uint64))
        return replace(
            self,
            hashes=hashes,
            left_out=self.left_out and self.left_out + len(self.hashes) - len(hashes),  # max_episodes counts all
            numbers=self.numbers[kept],
            episode=self.episode[kept],
            sequence=self.sequence[kept],
        )

    def sample(self, most: int, seed: int) -> "ScoredEpisodes":
        """Returns at most `most` of the episodes, drawn by seed and mdp_id, and this process's rows of them."""
        if len(self.hashes) <= most:
            return self
        hashes = np.sort(draw_hashes(self.hashes, most, seed))
        kept = find_hashes(hashes, self.episode.view(np.uint64)) >= 0
        return replace(
            self, hashes=hashes, numbers=self.numbers[kept], episode=self.episode[kept], sequence=self.sequence[kept]
        )


def scored_episodes(
    sides: TrainEvalLogs, settings: EvaluationConfig, seed: int, *, few: bool = False
) -> ScoredEpisodes:
    """Returns the scored episodes, and this rank's rows of them; every rank calls it.

    Whole episodes are scored, and models are fitted to the others. All eval episodes that are in no machine's training
    data are scored. Of the other eval episodes, or of the training episodes if there is no eval data, about
    held_out_share are scored, chosen by hash. An episode with an unknown action is left out: without that row the
    weights of all later rows are wrong. So is an episode with an aggregated row, as the actions inside it are unknown.
    An episode that several machines have is scored once; if each has different rows of it, all of them are scored.

    Args:
        sides: training and eval data.
        settings: settings of the evaluation.
        seed: seed of the draw if there are more than max_episodes.
        few: scores at least one episode and leaves at least one for fitting, whatever the hashes are; only for a log
            on one machine.
    """
    shards = sides.shards
    copy = sides.scored
    share = settings.held_out_share if sides.held_out is None else 1.0
    candidates = _EpisodeCandidates.of(sides, 1.0 if few else share)
    flags = _exchange(candidates, sides)
    selected = ~flags.trained_on | held_out(candidates.hashes, settings.held_out_share)
    notes = _left_out(candidates, flags, selected, shards)
    selected &= ~flags.faulty
    if few:
        _balance(candidates.hashes, selected, ~flags.faulty)
    usable = candidates.hashes[selected & ~flags.elsewhere]
    most = settings.max_episodes or _most_episodes(copy, shards)
    hashes, left_out, draw_notes = _draw(usable, most, seed, shards)
    repeats = _find_repeated(sides)
    scored_here = np.zeros(len(copy.episode_hash), np.bool_)
    scored_here[candidates.numbers] = (find_hashes(hashes, candidates.hashes) >= 0) & ~flags.copied
    numbers = shards.part(np.flatnonzero(scored_here[copy.episode]))
    codes = sides.hashes(copy).view(np.int64)
    return ScoredEpisodes(
        hashes=hashes,
        numbers=numbers,
        episode=codes[copy.episode[numbers]],
        sequence=np.asarray(copy.sequence[numbers], np.int64),
        notes=(*notes, *draw_notes, *repeats),
        repeats=bool(repeats),
        left_out=left_out,
    )


def validation_episodes(sides: TrainEvalLogs, scored: ScoredEpisodes, seed: int) -> NDArray[np.bool_]:
    """Returns which of this shard's training episodes are for validation, [episodes]; every rank calls it.

    About a tenth of the episodes that are not scored, chosen by hash of mdp_id and seed, the same on every machine; at
    least about ten, or none if there are too few episodes.

    Args:
        sides: training and eval data.
        scored: the scored episodes, of which none is chosen.
        seed: another seed chooses other episodes.
    """
    hashes = sides.hashes(sides.train)
    remaining = find_hashes(scored.hashes, hashes) < 0
    count = sum(sides.shards.counts(int(remaining.sum())))
    if count < FEWEST_TO_VALIDATE:
        return np.zeros(len(hashes), np.bool_)
    share = max(_VALIDATION_SHARE, _FEWEST_VALIDATED / count)
    return remaining & held_out(hashes ^ mix(np.array([seed], np.uint64)), share)


def _find_repeated(sides: TrainEvalLogs) -> list[str]:
    """Returns a sentence if eval episodes are in the training data under other mdp_ids; every rank calls it.

    Equal episodes may be chance in a log of few states and short episodes. About as many are expected as there are
    equal ones in the training data, and more than twice as many are no chance.
    """
    if sides.held_out is None or sides.same:
        return []
    shards = sides.shards
    training_digests = _contents(sides.train)
    held_out_digests = _contents(sides.held_out)
    equal = np.zeros(len(held_out_digests), np.bool_)
    named = np.zeros(len(held_out_digests), np.bool_)
    names = sides.hashes(sides.held_out)
    training_names = np.sort(sides.hashes(sides.train))
    trained = repeated = 0
    for reader in shards.first_readers:
        digests = _broadcast(training_digests, reader, shards)
        equal |= np.isin(held_out_digests, digests)
        named |= find_hashes(_broadcast(training_names, reader, shards), names) >= 0
        trained += len(digests)
        repeated += len(digests) - len(np.unique(digests))
    number, total = (sum(shards.counts(int(flags.sum()))) for flags in (equal & ~named, ~named))
    by_chance = repeated / max(trained, 1) * total
    if number <= _CHANCE_EPISODES + 2 * by_chance:
        return []
    return [
        f"{number:,} of {pluralize(total, 'eval episode')} are in the training data under another mdp_id, with the "
        "same states, actions, rewards and propensities: estimates may flatter a policy that has learned from them. "
        "Give an episode the same mdp_id in both logs, or leave these episodes out of the training data"
    ]


def _contents(copy: TrainingCopy) -> Hashes:
    """Returns a digest of each episode's rows, [episodes], without their sequence numbers."""
    return episode_digests(copy, np.ones(len(copy.episode_hash), np.bool_), numbered=False)


def _balance(hashes: Hashes, scored: NDArray[np.bool_], usable: NDArray[np.bool_]) -> None:
    """Moves an episode between scoring and fitting if one of them has none and the other has several."""
    if not scored.any() and usable.any():
        scored[np.flatnonzero(usable)[hashes[usable].argmin()]] = True
    if scored[usable].all() and scored.sum() > 1:
        scored[np.flatnonzero(usable)[hashes[usable].argmax()]] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpisodeCandidates:
    """Episodes of a shard that may be scored, in ascending order of their hashes.

    Attributes:
        numbers: [E] episode numbers in the shard's copy.
        hashes: [E] hashes of the episodes.
        digest: [E] uint64, equal for episodes with equal rows, including states and candidates; 0 for a single shard.
        unknown: [E] whether a row has no action.
        summed: [E] whether a row spans several steps.
    """

    numbers: NDArray[np.int64]
    hashes: Hashes
    digest: Hashes
    unknown: NDArray[np.bool_]
    summed: NDArray[np.bool_]

    @property
    def faulty(self) -> NDArray[np.bool_]:
        """[E] whether a row cannot be scored."""
        return self.unknown | self.summed

    @classmethod
    def of(cls, sides: TrainEvalLogs, share: float) -> "_EpisodeCandidates":
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
class _Flags:
    """Flags of a shard's candidates with regard to all machines, [E] bool each.

    Attributes:
        trained_on: the episode is in the training data of a machine.
        faulty: a machine has a row of it that cannot be scored.
        elsewhere: an earlier shard has the episode as well, and counts it.
        copied: an earlier shard has the same rows of it, and scores them.
    """

    trained_on: NDArray[np.bool_]
    faulty: NDArray[np.bool_]
    elsewhere: NDArray[np.bool_]
    copied: NDArray[np.bool_]


def _exchange(candidates: _EpisodeCandidates, sides: TrainEvalLogs) -> _Flags:
    """Compares this shard's candidates with the candidates and training episodes of every shard.

    every shard in turn broadcasts          every shard flags those of its candidates that are among them
    ───────────────────────────────         ─────────────────────────────────────────────────────────────
    hashes of its training episodes    ─►   trained_on
    hash, digest, faulty of each of    ─►   faulty, if faulty there
    its candidates                     ─►   if that shard comes earlier: elsewhere; copied, if the digests are equal
    """
    shards = sides.shards
    flags = _Flags(*np.zeros((4, len(candidates.hashes)), np.bool_))
    if sides.held_out is None:
        flags.trained_on[:] = True
    else:
        training = np.sort(sides.hashes(sides.train))
        for reader in shards.first_readers:
            flags.trained_on[:] |= find_hashes(_broadcast(training, reader, shards), candidates.hashes) >= 0
    if not shards.several:
        flags.faulty[:] = candidates.faulty
        return flags
    columns = np.stack((candidates.hashes, candidates.digest, candidates.faulty), dtype=np.uint64)
    for shard, reader in enumerate(shards.first_readers):
        hashes, digest, faulty = _broadcast(columns, reader, shards).reshape(3, -1)
        index = find_hashes(hashes, candidates.hashes)
        (shared,) = np.nonzero(index >= 0)
        flags.faulty[shared] |= faulty[index[shared]] > 0
        if shard < shards.own:
            flags.elsewhere[shared] = True
            flags.copied[shared] |= digest[index[shared]] == candidates.digest[shared]
    return flags


def _broadcast(values: Hashes, sender: int, shards: Shards) -> Hashes:
    """Returns the sender's values, flat, on every rank."""
    group = shards.group
    return np.frombuffer(group.broadcast_bytes(values.tobytes() if group.rank == sender else None, sender), np.uint64)


def find_hashes(ascending: Hashes, hashes: Hashes) -> NDArray[np.int64]:
    """Returns the index of each hash, [n], in an ascending array; -1 if it is not in there."""
    if not len(ascending):
        return np.full(len(hashes), -1, np.int64)
    indices = np.searchsorted(ascending, hashes).clip(max=len(ascending) - 1)
    return np.where(ascending[indices] == hashes, indices, -1)


def _most_episodes(copy: TrainingCopy, shards: Shards) -> int:
    """Returns how many episodes have about _MOST_CHOICES choices, at least _ALWAYS_SCORED; every rank calls it."""
    lists = np.diff(copy.list_offsets) if copy.parametric else np.array([len(copy.action_names)])
    choices = max(shards.counts(int(lists.max(initial=1))))
    rows = sum(shards.counts(len(copy)))
    episodes = sum(shards.counts(len(copy.episode_hash)))
    cells = rows * choices * (1 + len(copy.metric_names))
    return max(_ALWAYS_SCORED, int(_MOST_CHOICES * episodes / max(cells, 1)))


def _draw(hashes: Hashes, most: int, seed: int, shards: Shards) -> tuple[Hashes, int, list[str]]:
    """Draws at most `most` of all shards' hashes: in ascending order, with the number left out and with notes.

    The draw takes the first hashes in an order given by the seed. The first hashes of all shards together are among
    the first of each shard, so a shard sends only those.
    """
    count = sum(shards.counts(len(hashes)))
    proposed = draw_hashes(hashes, most, seed)
    proposals = [_broadcast(proposed, reader, shards) for reader in shards.first_readers]
    notes = []
    if count > most:
        notes.append(f"{most:,} of {count:,} episodes are scored; evaluation.max_episodes {count} scores all")
    elif shards.several:
        of_machines = f"of {len(proposals)} machines"
        notes.append(f"{pluralize(count, f'episode {of_machines} is', f'episodes {of_machines} are')} scored")
    return np.sort(draw_hashes(np.concatenate(proposals), most, seed)), max(count - most, 0), notes


def spread(numbers: NDArray[Integer], most: int) -> NDArray[Integer]:
    """Returns at most `most` of the numbers, evenly spread over them."""
    return numbers if most >= len(numbers) else numbers[np.linspace(0, len(numbers) - 1, most).astype(np.int64)]


def draw_hashes(hashes: Hashes, most: int, seed: int) -> Hashes:
    """Returns at most `most` of the hashes: the first ones in an order given by the seed."""
    if len(hashes) <= most:
        return hashes
    return hashes[np.argsort(mix(hashes ^ mix(np.array([seed], np.uint64))), kind="stable")[:most]]


def _left_out(candidates: _EpisodeCandidates, flags: _Flags, selected: NDArray[np.bool_], shards: Shards) -> list[str]:
    """Returns sentences on episodes with rows that cannot be scored, and on episodes that several machines have."""
    unknown, summed, shared = (
        sum(shards.counts(int((selected & affected).sum())))
        for affected in (
            candidates.unknown & ~flags.elsewhere,
            candidates.summed & ~flags.elsewhere,
            flags.elsewhere & ~flags.faulty,
        )
    )
    notes = []
    if unknown:
        notes.append(f"not scored: {pluralize(unknown, 'episode')} with an unknown action")
    if summed:
        notes.append(
            f"not scored: {pluralize(summed, 'episode')} with rows that span several steps; give eval_data_path of a "
            "timeline with steps 1"
        )
    if shared:
        notes.append(
            f"{pluralize(shared, 'time')} a machine has rows of an episode that an earlier one has too; each episode "
            "counts once"
        )
    return notes


def episode_digests(copy: TrainingCopy, wanted: NDArray[np.bool_], *, numbered: bool = True) -> Hashes:
    """Returns a digest of each episode's states, actions, choices, rewards and propensities, [episodes].

    It does not depend on the order of rows, features and files, nor on features that no row of the episode has.

    Args:
        copy: training or eval data.
        wanted: [episodes] bool, episodes to digest; the digest of the others is 0.
        numbered: whether sequence numbers count.
    """
    digests = np.zeros(len(wanted), np.uint64)
    if not wanted.any():
        return digests
    choices = choices_hashes(copy)
    size = min(_DIGEST_ROWS, max(_DIGEST_VALUES // max(len(copy.state_ids), 1), 1))
    for start in range(0, len(copy), size):
        rows = start + np.flatnonzero(wanted[copy.episode[start : start + size]])
        row = hashes_of(copy.state_ids, copy.state[rows], np.ones(len(rows), np.int64))
        if numbered:
            row = mix(row ^ np.asarray(copy.sequence[rows], np.int64).view(np.uint64))
        for column in (copy.action[rows], copy.reward[rows], copy.propensity[rows]):
            row = mix(row ^ np.ascontiguousarray(column).view(np.uint32).astype(np.uint64))
        if copy.parametric:
            row = mix(row ^ choices[copy.actions_list[rows]])
        np.add.at(digests, copy.episode[rows], row)
        copy.release()
    return digests
