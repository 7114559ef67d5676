import numpy as np
import pytest

from trueup._core import native


def test_a_worker_beside_others_keeps_to_so_many_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert native.count_threads() == 3
    with native.limit_threads(1):
        assert native.count_threads() == 1
        with native.limit_threads(8):
            assert native.count_threads() == 3
    with pytest.raises(ZeroDivisionError), native.limit_threads(1):
        raise ZeroDivisionError
    assert native.count_threads() == 3


def test_an_error_of_a_thread_is_raised_in_the_callers(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def fail(parts):
        raise ValueError("of a thread")

    with pytest.raises(ValueError, match="of a thread"):
        list(native.map_threads(np.zeros((native.MIN_PARALLEL_NUMBERS, 1)), fail))
