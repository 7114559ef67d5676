import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.serve.session_store import Missing, Store


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def store(clock, **options):
    return Store(**{"seconds": 10, "max_bytes": 100, "clock": clock, **options})


def test_use_renews_the_time():
    clock = Clock()
    kept = store(clock)
    used, unused = kept.put("used", 1), kept.put("unused", 1)
    clock.now = 8
    assert kept.get(used, str) == "used"
    clock.now = 11
    assert kept.get(used, str) == "used"
    with pytest.raises(Missing):
        kept.get(unused, str)
    assert len(kept) == 1


def test_the_longest_unused_goes_first():
    kept = store(Clock())
    first, second = kept.put("first", 40), kept.put("second", 40)
    kept.get(first, str)
    third = kept.put("third", 40)
    assert [name in kept for name in (first, second, third)] == [True, False, True]


def test_what_grows_makes_room_for_itself():
    kept = store(Clock())
    first, second = kept.put("first", 10), kept.put("second", 10)
    kept.resize(first, 95)
    assert (first in kept, second in kept, kept.size) == (True, False, 95)
    kept.resize("gone", 5)
    assert kept.size == 95


def test_another_kind_is_missing():
    kept = store(Clock())
    name = kept.put("text", 1)
    with pytest.raises(Missing):
        kept.get(name, int)
    with pytest.raises(Missing):
        kept.remove("nothing")
    assert kept.remove(name) == "text"


@given(st.lists(st.tuples(st.integers(0, 120), st.floats(0, 6)), max_size=30))
def test_budget_and_time_hold(sizes):
    clock = Clock()
    kept = store(clock)
    put = {}
    for size, wait in sizes:
        clock.now += wait
        put[kept.put(size, size)] = clock.now
        alive = [name for name in put if name in kept]
        assert kept.size <= 100 or len(alive) == 1
        assert all(put[name] >= clock.now - 10 for name in alive)
        assert alive[-1] == list(put)[-1]
