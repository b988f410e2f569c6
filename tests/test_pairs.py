"The combinations that other tests run leave no pair of values out."

import itertools

from pairs import pairwise


def pairs_of(rows) -> set:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


# catches: a pair of settings that no run has, a combination that is not allowed
def test_each_pair_that_is_allowed_is_in_some_row():
    axes = (1, 2, 3), (1, 2, 4), (1, 2, 3, 4), (1, 3)
    fits = lambda rows, accumulation, parts, epochs: rows * accumulation % parts == 0
    chosen = pairwise(*axes, allowed=fits)
    whole = [row for row in itertools.product(*axes) if fits(*row)]
    assert pairs_of(chosen) == pairs_of(whole) and {*chosen} <= {*whole}
    assert len(chosen) < len(whole) / 3 and pairs_of(chosen[1:]) != pairs_of(whole)
