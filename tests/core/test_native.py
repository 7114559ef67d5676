import pytest
import torch

from trueup.core.native import one_thread


def test_few_numbers_are_worked_on_by_one_thread_and_the_count_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(1000):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), one_thread(1000):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
        with one_thread(1 << 30):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
