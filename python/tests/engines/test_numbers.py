"""Numbers of versions: what is refused or fails leaves the count as it was; no engine is needed."""

import pytest
from tessera import InvalidArgumentError
from tessera.engines._numbers import Number, Numbers


def sent(numbers, *versions):
    """Sends them; returns their numbers. An exception fails the version before it."""
    sent_numbers = []
    for version, error in versions:
        number = numbers.next(version)
        with numbers.sending(number):
            if error is not None:
                raise error
        sent_numbers.append(number)
    return sent_numbers


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([None, None], [(1, 0), (2, 0)]),
        ([5, None, 9, None], [(5, 0), (6, 0), (9, 0), (10, 0)]),
        ([0, None, 2, 10, None], [(0, 1), (1, 1), (2, 1), (10, 1), (11, 1)]),
    ],
)
def test_versions_grow(versions, expected):
    numbers = Numbers(1)
    assert sent(numbers, *((version, None) for version in versions)) == expected
    assert [number.on_bus for number in map(Number._make, expected)] == [sum(number) for number in expected]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("first", [None, 0, 5])
@pytest.mark.parametrize("refused", [-1, "same", "older", 5.0, "5", True, 1 << 70])
def test_a_version_that_is_refused_leaves_the_count_as_it_was(world, first, refused):
    numbers = Numbers(world)
    (last,) = sent(numbers, (first, None))
    version = {"same": last.version, "older": last.version - 1}.get(refused, refused)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="version"):
            sent(numbers, (version, None))
        assert numbers.last == last
    assert sent(numbers, (None, None)) == [last._replace(version=last.version + 1)]


def test_a_first_version_that_is_refused_or_fails_leaves_nothing():
    numbers = Numbers(1)
    for version, error in ((-1, None), (7, ValueError()), (0, KeyboardInterrupt())):
        with pytest.raises((InvalidArgumentError, ValueError, KeyboardInterrupt)):
            sent(numbers, (version, error))
    assert sent(numbers, (None, None)) == [(1, 0)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_version_that_fails_may_be_sent_again_unless_other_ranks_may_have_sent_it(error):
    alone, several = Numbers(1), Numbers(2)
    for numbers in (alone, several):
        sent(numbers, (5, None))
        with pytest.raises(error):
            sent(numbers, (8, error()))
    assert sent(alone, (None, None), (8, None)) == [(6, 0), (8, 0)]
    with pytest.raises(InvalidArgumentError, match="failed here, and which other ranks may have sent: give a newer"):
        sent(several, (8, None))
    assert sent(several, (None, None)) == [(9, 0)]
