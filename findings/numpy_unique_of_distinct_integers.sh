#!/usr/bin/env bash
# np.unique of many distinct integers takes many times as long as sorting them; returning more makes it faster
#
# Expected  np.unique(x) costs about one sort of x, as it did before hashing came (NumPy 2.3), and no more than
#           np.unique(x, return_inverse=True), which has more to return. np.isin(x, y) costs a few sorts.
# True      Without other outputs integers go through a hash table. For a million distinct int64 that takes 10 to 30
#           times as long as np.sort, and several times as long as the call that returns the inverse as well, which
#           sorts. Floats with as many distinct values cost one sort; integers with few distinct values gain from the
#           hash table. np.isin of integers of a wide range calls np.unique for its second argument and pays too.
# Matters   codes and hashes of episodes, users and items are just such integers: of a log of a million decisions,
#           one np.unique takes seconds. np.unique(x, return_inverse=True)[0], or a sort and a comparison, does not.
# Versions  numpy 2.4.6, Python 3.11, x86-64
# Date      2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 2>/dev/null
"$folder/venv/bin/python" - <<'P'
import time

import numpy as np


def seconds(work):
    """Returns the least of three times."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


rows = 1_000_000
rng = np.random.default_rng(0)
wide = rng.integers(0, 2**62, rows)
few = rng.integers(0, 1_000, rows)
floats = rng.random(rows)
print("numpy", np.__version__)
ratio = {}
for name, x in (("distinct int64", wide), ("1,000 levels of int64", few), ("distinct float64", floats)):
    sort = seconds(lambda: np.sort(x))
    unique = seconds(lambda: np.unique(x))
    more = seconds(lambda: np.unique(x, return_inverse=True))
    assert np.array_equal(np.unique(x), np.unique(x, return_inverse=True)[0])
    ratio[name] = unique / sort, unique / more
    print(f"{name}: sort {sort:.3f} s, unique {unique:.3f} s ({unique / sort:.1f} x), with inverse {more:.3f} s")
isin = seconds(lambda: np.isin(wide, wide[::2]))
sort = seconds(lambda: np.sort(wide))
print(f"isin of distinct int64 in half of them: {isin:.3f} s, {isin / sort:.1f} sorts")
assert ratio["distinct int64"][0] > 4, "distinct integers are no longer much slower than a sort"
assert ratio["distinct int64"][1] > 2, "the call that returns the inverse as well is no longer the faster one"
assert ratio["1,000 levels of int64"][0] < 2
assert ratio["distinct float64"][0] < 4
print("as described: np.unique of distinct integers takes many sorts, and less if more is asked for")
P
