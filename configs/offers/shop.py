"""A shop whose truth is known: it writes logs of offers and clicks, and says what a model earns there.

python configs/offers/shop.py log configs/offers/log.csv
python configs/offers/shop.py play outputs/offers/model
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reagent_lite import load_bundle

Column = NDArray[np.generic]

OFFERS = ("discount", "free shipping", "gift")
COUNTRIES = ("BR", "DE", "FR", "US")
DEVICES = ("desktop", "mobile", "tablet")


def draw_visitors(rows: int, rng: np.random.Generator) -> dict[str, Column]:
    """Returns the columns of visitors, [rows] each: country, device and the number of earlier visits."""
    return {
        "country": rng.choice(COUNTRIES, rows, p=(0.2, 0.3, 0.2, 0.3)),
        "device": rng.choice(DEVICES, rows, p=(0.4, 0.5, 0.1)),
        "visits": rng.poisson(3, rows),
    }


def click_chances(visitors: dict[str, Column]) -> NDArray[np.float64]:
    """Returns the probability of a click, [rows, offers]."""
    country, device, visits = visitors["country"], visitors["device"], visitors["visits"]
    discount = 0.10 + 0.20 * np.isin(country, ("BR", "US"))
    shipping = 0.08 + 0.22 * (country == "DE") + 0.04 * (device == "desktop")
    gift = 0.06 + 0.06 * np.minimum(visits, 5) * (device == "mobile")
    return np.stack((discount, shipping, gift), axis=1)


def logging_policy(visitors: dict[str, Column]) -> NDArray[np.float64]:
    """Returns the probability of each offer, [rows, offers]: mostly the discount, free shipping on a desktop."""
    usual = np.where(visitors["device"] == "desktop", 1, 0)
    return 0.2 + 0.4 * np.eye(len(OFFERS))[usual]


def write_log(path: Path, *, rows: int, seed: int) -> None:
    """Writes a CSV with a row for each decision: visitor, offer, click, and the probability of the offer."""
    rng = np.random.default_rng(seed)
    visitors = draw_visitors(rows, rng)
    propensities = logging_policy(visitors)
    offers = (propensities.cumsum(axis=1) < rng.random((rows, 1))).sum(axis=1)
    logged = np.arange(rows), offers
    clicks = (rng.random(rows) < click_chances(visitors)[logged]).astype(int)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*visitors, "offer", "click", "propensity"))
        columns = (*visitors.values(), np.array(OFFERS)[offers], clicks, propensities[logged].round(2))
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def play(model: Path, *, visits: int, seed: int) -> tuple[float, float]:
    """Returns clicks per visit, of the exported model and of the policy that wrote the log."""
    visitors = draw_visitors(visits, np.random.default_rng(seed))
    columns = {name: column.tolist() for name, column in visitors.items()}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    chances = click_chances(visitors)
    bundle = load_bundle(model)
    order = [bundle.action_names.index(offer) for offer in OFFERS]
    learned = bundle.predict_rows(rows).propensities[:, order]
    return float((learned * chances).sum(1).mean()), float((logging_policy(visitors) * chances).sum(1).mean())


def main() -> None:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    log = commands.add_parser("log", help="write a log")
    log.add_argument("path", type=Path)
    log.add_argument("--rows", type=int, default=4000)
    played = commands.add_parser("play", help="play an exported model")
    played.add_argument("path", type=Path)
    played.add_argument("--visits", type=int, default=20_000)
    for command in (log, played):
        command.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "log":
        write_log(arguments.path, rows=arguments.rows, seed=arguments.seed)
        return
    model, logged = play(arguments.path, visits=arguments.visits, seed=arguments.seed)
    print(f"true clicks per visit: {model:.4f} with the model, {logged:.4f} with the policy of the log")


if __name__ == "__main__":
    main()
