"""One-step worlds of known mean rewards: features, the mean reward of every action, and a logger. NumPy only.

world(rows, rng, truth) ─► Rows: features, means, probabilities of the logger ─► Log: one action and its reward a row

`truth` draws what is fixed in a world, such as the taste of a segment, and is the same for its log and its test rows;
`rng` draws the rows. Texts are categories; integers and floats are numbers.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Generator = np.random.Generator
Columns = Mapping[str, NDArray[np.generic]]

TEST_ROWS = 20_000


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a world, before any action.

    Attributes:
        state: {feature: [N]}.
        mean: [N, K] expected reward of every action; that of an absent candidate is the least of its row.
        logger: [N, K] probabilities of the logging policy; 0 for an absent candidate.
        earn: returns rewards [N] of actions [N].
        candidates: {feature: [N, K]} of candidates; None if actions have names.
        items: {feature: [M]} of a catalog whose items the candidates are; None without one.
        item: [N, K] which item a candidate is; None without a catalog.
    """

    state: Columns
    mean: Array
    logger: Array
    earn: Callable[[Ints, Generator], Array]
    candidates: Columns | None = None
    items: Columns | None = None
    item: Ints | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """[N, K] which candidates there are."""
        return self.logger > 0

    def value(self, action: Ints) -> float:
        """Returns the true value of actions [N]."""
        return float(at(self.mean, action).mean())

    @property
    def best(self) -> float:
        """The value of the best policy."""
        return float(self.mean.max(1).mean())

    @property
    def logged(self) -> float:
        """The value of the logging policy."""
        return float((self.logger * self.mean).sum(1).mean())


@dataclass(frozen=True, kw_only=True)
class Log:
    """Rows with the action that was taken, its reward and its probability, all [N]."""

    rows: Rows
    action: Ints
    reward: Array
    propensity: Array


@dataclass(frozen=True, kw_only=True)
class World:
    """A world and how many rows its log has."""

    draw: Callable[[int, Generator, Generator], Rows]
    rows: int
    large: bool = False

    @property
    def name(self) -> str:
        return self.draw.__name__

    def log(self, seed: int) -> Log:
        """Returns the log to learn from."""
        rows = self._rows(self.rows, seed, 0)
        rng = self._rng(seed, 1)
        action = drawn(rows.logger, rng)
        return Log(rows=rows, action=action, reward=rows.earn(action, rng), propensity=at(rows.logger, action))

    def test(self, seed: int) -> Rows:
        """Returns the rows that policies are valued on."""
        return self._rows(TEST_ROWS, seed, 2)

    def _rows(self, rows: int, seed: int, part: int) -> Rows:
        return self.draw(rows, self._rng(seed, part), self._rng(seed, 3))

    def _rng(self, seed: int, part: int) -> Generator:
        return np.random.default_rng([seed, zlib.crc32(self.name.encode()), part])


def at(table: Array, action: Ints) -> Array:
    """Returns [N] the entry of each row's action."""
    return np.asarray(table[np.arange(len(action)), action])


def drawn(probabilities: Array, rng: Generator) -> Ints:
    """Draws an index per row [N, K]; entries of probability 0 are never drawn."""
    sums = probabilities.cumsum(1)
    return np.asarray((rng.random((len(sums), 1)) * sums[:, -1:] >= sums).sum(1), dtype=np.int64)


def sigmoid(score: Array) -> Array:
    return 1 / (1 + np.exp(-score))


def names(prefix: str, code: Ints) -> NDArray[np.str_]:
    """Returns texts in place of numbers."""
    return np.char.add(prefix, code.astype(str))


def columns(values: Array, prefix: str = "x") -> dict[str, Array]:
    """Returns columns x0, x1, ... of a matrix."""
    return {f"{prefix}{number}": values[:, number] for number in range(values.shape[1])}


def events(mean: Array) -> Callable[[Ints, Generator], Array]:
    """Rewards 1 with the probability `mean`, otherwise 0."""
    return lambda action, rng: (rng.random(len(action)) < at(mean, action)).astype(np.float64)


def noisy(mean: Array, deviation: float) -> Callable[[Ints, Generator], Array]:
    """Rewards with normal noise."""
    return lambda action, rng: at(mean, action) + rng.normal(scale=deviation, size=len(action))


def uniform(mean: Array) -> Array:
    """Probabilities of a logger that takes every action alike."""
    return np.full(mean.shape, 1 / mean.shape[1])


def leaning(mean: Array, truth: Generator, share: float) -> Array:
    """Probabilities of a logger that knows the means but for an error of each action, and explores in 1 - share."""
    score = (mean + truth.normal(size=mean.shape[1]) * mean.std()) / (0.7 * mean.std())
    odds = np.exp(score - score.max(1, keepdims=True))
    return np.asarray(share * odds / odds.sum(1, keepdims=True) + (1 - share) / mean.shape[1])


def shop(rows: int, rng: Generator, truth: Generator) -> Rows:
    """6 000 rows, 3 actions; clicks of 5 %, of 30 % where the action fits region and age; uniform log."""
    age, region, device = rng.integers(18, 80, rows), rng.integers(4, size=rows), rng.integers(3, size=rows)
    mean = np.where(np.arange(3) == ((region + (age > 45)) % 3)[:, None], 0.30, 0.05)
    state = {
        "age": age,
        "region": np.array(["north", "south", "east", "west"])[region],
        "device": np.array(["phone", "tablet", "desk"])[device],
    }
    return Rows(state=state, mean=mean, logger=uniform(mean), earn=events(mean))


GLYPHS = (
    "0111010001100111010111001100010111000100011000010000100001000010001110"
    "0111010001000010001000100010001111111111000100010000010000011000101110"
    "0001000110010101001011111000100001011111100001111000001000011000101110"
    "0011001000100001111010001100010111011111000010001000100010000100001000"
    "0111010001100010111010001100010111001110100011000101111000010001001100"
)  # ten digits, 5 x 7


def glyphs(rows: int, rng: Generator, truth: Generator) -> Rows:
    """12 000 rows, 10 actions; 64 gray values of a digit, moved and noisy; reward 1 for its name; uniform log."""
    shapes = np.array(list(GLYPHS), dtype=np.float64).reshape(10, 7, 5)
    digit, down, right = rng.integers(10, size=rows), rng.integers(2, size=rows), rng.integers(4, size=rows)
    image = np.zeros((rows, 8, 8))
    for shift in np.ndindex(2, 4):
        moved = (down == shift[0]) & (right == shift[1])
        image[moved, shift[0] : shift[0] + 7, shift[1] : shift[1] + 5] = shapes[digit[moved]]
    gray = image * rng.uniform(8, 16, (rows, 1, 1)) + rng.normal(scale=3, size=image.shape)
    mean = np.eye(10)[digit]
    state = columns(gray.clip(0, 16).round().reshape(rows, 64), "pixel")
    return Rows(state=state, mean=mean, logger=uniform(mean), earn=events(mean))


def linear(rows: int, rng: Generator, truth: Generator) -> Rows:
    """10 000 rows, 5 actions, 10 features; rewards linear in them, noise of deviation 1; uniform log."""
    x = rng.normal(size=(rows, 10))
    mean = x @ truth.normal(size=(10, 5)) / np.sqrt(10)
    return Rows(state=columns(x), mean=mean, logger=uniform(mean), earn=noisy(mean, 1))


def steep(rows: int, rng: Generator, truth: Generator) -> Rows:
    """20 000 rows, as linear; the log explores in a tenth of the rows."""
    x = rng.normal(size=(rows, 10))
    mean = x @ truth.normal(size=(10, 5)) / np.sqrt(10)
    return Rows(state=columns(x), mean=mean, logger=leaning(mean, truth, 0.9), earn=noisy(mean, 1))


def product(rows: int, rng: Generator, truth: Generator) -> Rows:
    """10 000 rows, 3 actions, 5 features; the sign of a product decides between 80 and 20 %, or 45 %; uniform log."""
    x = rng.uniform(-1, 1, (rows, 5))
    same = x[:, 0] * x[:, 1] > 0
    mean = np.stack([np.where(same, 0.8, 0.2), np.where(same, 0.2, 0.8), np.full(rows, 0.45)], 1)
    return Rows(state=columns(x), mean=mean, logger=uniform(mean), earn=events(mean))


def clicks(rows: int, rng: Generator, truth: Generator) -> Rows:
    """60 000 rows, 20 actions; clicks of 2.6 % in the mean, other for each of 12 segments; uniform log."""
    rate = truth.lognormal(0, 0.6, (12, 20))
    segment = rng.integers(12, size=rows)
    mean = (0.026 * rate / rate.mean())[segment].clip(0, 0.9)
    state = {"segment": names("s", segment), "hour": rng.integers(24, size=rows)}
    return Rows(state=state, mean=mean, logger=uniform(mean), earn=events(mean))


def revenue(rows: int, rng: Generator, truth: Generator) -> Rows:
    """20 000 rows, 4 actions, 5 features; 8 to 12 % buy, for lognormal amounts; uniform log."""
    x = rng.normal(size=(rows, 5))
    buys = sigmoid(x @ truth.normal(scale=0.5, size=(5, 4)) - 2.5)
    amount = np.exp(3 + 0.3 * x[:, :1] * np.array([1, -1, 0.5, 0]))

    def earn(action: Ints, rng: Generator) -> Array:
        bought = rng.random(rows) < at(buys, action)
        return bought * at(amount, action) * rng.lognormal(-0.5, 1, rows)

    return Rows(state=columns(x), mean=buys * amount, logger=uniform(buys), earn=earn)


def cities(rows: int, rng: Generator, truth: Generator) -> Rows:
    """30 000 rows, 4 actions; a category of 300 levels, few of them frequent; noise of deviation 0.5; uniform log."""
    taste = truth.normal(scale=0.125, size=(300, 4))
    city = rng.choice(300, rows, p=truth.dirichlet(np.full(300, 0.5)))
    z = rng.normal(size=rows)
    mean = 0.5 + taste[city] + 0.1 * z[:, None] * np.array([1, -1, 0, 0.5])
    return Rows(state={"city": names("c", city), "z": z}, mean=mean, logger=uniform(mean), earn=noisy(mean, 0.5))


def stores(rows: int, rng: Generator, truth: Generator) -> Rows:
    """60 000 rows, 3 actions; 1 000 stores, clicks of 10 % in the mean; in each store the log prefers an action."""
    kind = truth.integers(8, size=1_000)
    taste = truth.normal(scale=0.6, size=(8, 3))[kind] + truth.normal(scale=0.4, size=(1_000, 3))
    store, weekend = rng.integers(1_000, size=rows), rng.integers(2, size=rows)
    mean = sigmoid(taste[store] + 0.3 * weekend[:, None] * np.array([1, 0, -1]) - 2.4)
    habit = 0.6 * np.eye(3)[truth.integers(3, size=1_000)] + 0.4 / 3
    state = {"store": names("store", store), "day": np.array(["weekday", "weekend"])[weekend]}
    return Rows(state=state, mean=mean, logger=habit[store], earn=events(mean))


def costs(rows: int, rng: Generator, truth: Generator) -> Rows:
    """20 000 rows, 2 actions, 8 features; 97 % of the log does nothing, which costs 10 where harm comes.

    To act costs 0.7, and harm then costs 2.
    """
    x = rng.normal(size=(rows, 8))
    risk = sigmoid(x[:, 0] + 0.8 * x[:, 1] * (x[:, 2] > 0) - 3.5)
    price, harm = np.array([0, 0.7]), np.array([10, 2])

    def earn(action: Ints, rng: Generator) -> Array:
        return np.asarray(-price[action] - harm[action] * (rng.random(rows) < risk))

    mean = -price - harm * risk[:, None]
    return Rows(state=columns(x), mean=mean, logger=np.tile([0.97, 0.03], (rows, 1)), earn=earn)


def many(rows: int, rng: Generator, truth: Generator) -> Rows:
    """100 000 rows, 200 actions, 6 features; events of 20 % in the mean; half of the log leans."""
    x = rng.normal(size=(rows, 6))
    weights, level = truth.normal(scale=0.25, size=(6, 200)), truth.normal(scale=0.1, size=200)
    mean = sigmoid(x @ weights + level - 2)
    return Rows(state=columns(x), mean=mean, logger=leaning(mean, truth, 0.5), earn=events(mean))


def small(rows: int, rng: Generator, truth: Generator) -> Rows:
    """1 000 rows, 3 actions, 8 features; events of 40 % in the mean; uniform log."""
    x = rng.normal(size=(rows, 8))
    mean = sigmoid(x @ truth.normal(scale=0.5, size=(8, 3)) - 0.5)
    return Rows(state=columns(x), mean=mean, logger=uniform(mean), earn=events(mean))


def steps(rows: int, rng: Generator, truth: Generator) -> Rows:
    """8 000 rows, 4 actions, 6 whole numbers; rewards jump at thresholds, noise of deviation 0.5; 60 % leans."""
    x = rng.integers(101, size=(rows, 6))

    def jumps(first: int, second: int, third: int) -> Array:
        return 1.0 * (x[:, first] > 60) + 1.5 * ((x[:, second] < 30) & (x[:, third] > 50))

    mean = np.stack([jumps(0, 1, 2), jumps(3, 4, 5), jumps(1, 5, 0), np.full(rows, 0.6)], 1)
    return Rows(state=columns(x), mean=mean, logger=leaning(mean, truth, 0.6), earn=noisy(mean, 0.5))


def habit(rows: int, rng: Generator, truth: Generator) -> Rows:
    """15 000 rows, 3 doses, an age and 4 numbers; 98 % of the log follows a rule by age, as the reward does."""
    age, x = rng.integers(18, 95, rows), rng.normal(size=(rows, 4))
    frailty = (age - 55) / 20
    fits = np.stack([frailty + x[:, 0], 0.6 + 0.3 * x[:, 1], 0.4 - frailty + x[:, 2] * x[:, 0]], 1)
    rule = np.digitize(age, (40, 65))
    logger = 0.98 * np.eye(3)[rule] + 0.02 / 3
    mean = -1.5 * frailty[:, None] + 0.6 * fits
    return Rows(state={"age": age, **columns(x)}, mean=mean, logger=logger, earn=noisy(mean, 1))


def rare(rows: int, rng: Generator, truth: Generator) -> Rows:
    """300 000 rows, 5 actions, 10 segments and 4 numbers; events of 0.5 % in the mean; half of the log leans."""
    x, segment = rng.normal(size=(rows, 4)), rng.integers(10, size=rows)
    score = truth.normal(scale=0.5, size=(10, 5))[segment] + x @ truth.normal(scale=0.4, size=(4, 5))
    mean = (0.002 * np.exp(score)).clip(0, 0.2)
    state = {**columns(x), "segment": names("g", segment)}
    return Rows(state=state, mean=mean, logger=leaning(mean, truth, 0.5), earn=events(mean))


def banners(rows: int, rng: Generator, truth: Generator) -> Rows:
    """1 000 000 rows, 8 actions; clicks of 1 % in the mean by country (40), device, age and hour; 70 % leans."""
    country, device = rng.integers(40, size=rows), rng.integers(3, size=rows)
    age, hour = rng.integers(18, 80, rows), rng.integers(24, size=rows)
    score = truth.normal(scale=0.4, size=(40, 8))[country] + truth.normal(scale=0.3, size=(3, 8))[device]
    score += ((age - 49) / 18)[:, None] * truth.normal(scale=0.4, size=8)
    score += np.cos((hour[:, None] - truth.integers(24, size=8)) * np.pi / 12) * 0.3
    mean = (0.005 * np.exp(score)).clip(0, 0.3)
    state = {"country": names("c", country), "device": names("d", device), "age": age, "hour": hour}
    return Rows(state=state, mean=mean, logger=leaning(mean, truth, 0.7), earn=events(mean))


def offers(rows: int, rng: Generator, truth: Generator) -> Rows:
    """20 000 rows of 3 to 10 candidates with price, rating and kind; 8 % buy.

    Whoever is richer minds the price less, and each of three groups has a kind that it likes; the log prefers high
    ratings and low prices.
    """
    income, group = rng.normal(size=rows), rng.integers(3, size=rows)
    price, rating = rng.uniform(1, 9, (rows, 10)), rng.uniform(1, 5, (rows, 10))
    kind = rng.integers(4, size=(rows, 10))
    liking = truth.normal(scale=0.9, size=(3, 4))[group[:, None], kind]
    dear = (price - 5) / 2.3
    score = liking + 0.4 * (rating - 3) - (0.7 - 0.6 * income[:, None]) * dear - 3.4
    odds = np.exp(0.5 * rating - 0.4 * dear) * (np.arange(10) < rng.integers(3, 11, rows)[:, None])
    logger = odds / odds.sum(1, keepdims=True)
    mean = _least_where_absent(sigmoid(score), logger)
    state = {"income": income, "group": names("g", group)}
    candidates = {"price": price.round(2), "rating": rating.round(1), "kind": names("k", kind)}
    return Rows(state=state, mean=mean, logger=logger, earn=events(mean), candidates=candidates)


def films(rows: int, rng: Generator, truth: Generator) -> Rows:
    """40 000 rows of 8 of 150 films of an item table; a viewer's minutes, with noise; the log prefers popular ones.

    Minutes depend on the genre beside the viewer's age, on how new the film is, and on its length in the evening.
    """
    genre, year, length = truth.integers(6, size=150), truth.integers(1970, 2025, 150), truth.integers(70, 180, 150)
    fame = truth.uniform(0, 1, 150).round(3)
    age, evening = rng.integers(12, 80, rows), rng.integers(2, size=rows)
    item = rng.random((rows, 150)).argpartition(8, axis=1)[:, :8]
    slope = truth.normal(scale=10, size=6)[genre[item]]
    old = (2000 - year[item]) / 16
    mean = 40 + slope * ((age - 45) / 20)[:, None] + 5 * fame[item] + 4 * old * ((age - 45) / 20)[:, None]
    mean += 6 * ((length[item] - 125) / 32) * np.where(evening, 1, -1)[:, None]
    odds = np.exp(2.5 * fame[item])
    items = {"genre": names("g", genre), "year": year, "length": length, "fame": fame}
    return Rows(
        state={"age": age, "time": np.array(["day", "evening"])[evening]},
        mean=mean,
        logger=odds / odds.sum(1, keepdims=True),
        earn=noisy(mean, 25),
        candidates={name: column[item] for name, column in items.items()},
        items=items,
        item=item,
    )


def _least_where_absent(mean: Array, logger: Array) -> Array:
    return np.where(logger > 0, mean, mean.min(1, keepdims=True))


WORLDS = {
    world.name: world
    for world in (
        World(draw=small, rows=1_000),
        World(draw=shop, rows=6_000),
        World(draw=steps, rows=8_000),
        World(draw=linear, rows=10_000),
        World(draw=product, rows=10_000),
        World(draw=glyphs, rows=12_000),
        World(draw=habit, rows=15_000),
        World(draw=revenue, rows=20_000),
        World(draw=costs, rows=20_000),
        World(draw=steep, rows=20_000),
        World(draw=cities, rows=30_000),
        World(draw=clicks, rows=60_000),
        World(draw=stores, rows=60_000),
        World(draw=offers, rows=20_000),
        World(draw=films, rows=40_000),
        World(draw=many, rows=100_000),
        World(draw=rare, rows=300_000),
        World(draw=banners, rows=1_000_000, large=True),
    )
}
