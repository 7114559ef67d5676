import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.module import _halving, count_below, softplus

places = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.75, 1.0, 2.0]), max_size=70).map(sorted)
values = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 0.5, 0.5000001, 0.8, 1.0, 2.0, 3.0]), max_size=12)


@given(places, values, st.booleans())
def test_the_search_counts(where, x, right):
    count = [sum(p <= v if right else p < v for p in where) for v in x]
    p, v = torch.tensor(where, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)
    assert count_below(p, v, right=right).tolist() == count
    assert _halving(p, v, right).tolist() == count if where else count == [0] * len(x)


@given(places, places, values)
def test_the_search_goes_row_by_row(first, second, x):
    m = min(len(first), len(second))
    if not m:
        return
    where = torch.tensor([first[:m], second[:m]])
    v = torch.tensor([x, x[::-1]]).reshape(2, len(x))
    for right in (False, True):
        assert torch.equal(_halving(where, v, right), torch.searchsorted(where, v, right=right))


def test_the_search_is_written_out_in_an_export():
    class Search(torch.nn.Module):
        def forward(self, x):
            return count_below(torch.tensor([0.1, 0.5]), x)

    program = torch.export.export(Search(), (torch.rand(4),))
    assert "searchsorted" not in str(program.graph)


def test_softplus_is_exact():
    x = torch.tensor([-800.0, -30.0, -1.0, 0.0, 1.0, 19.0, 25.0, 800.0], dtype=torch.float64)
    expected = [math.log1p(math.exp(-abs(v))) + max(v, 0.0) for v in x.tolist()]
    assert softplus(x).tolist() == expected
    wanted = torch.sigmoid(x)
    x.requires_grad_()
    softplus(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted)
