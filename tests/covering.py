"""A selection of cases in which every pair of options meets."""

from __future__ import annotations

import itertools
import random


def covering(axes, seed: int) -> list[dict]:
    """Cases in which every pair of values of two axes occurs; greedy, the same in every run."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    cases = []
    while missing:
        best, best_pairs = None, set()
        for _ in range(60):
            case = {name: rng.choice(axes[name]) for name in names}
            case.update(rng.choice(sorted(missing, key=str)))
            pairs = set(itertools.combinations(case.items(), 2)) & missing
            if len(pairs) > len(best_pairs):
                best, best_pairs = case, pairs
        cases.append(best)
        missing -= best_pairs
    return cases
