import math

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from trueup._core.namespace import namespace_of

places = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.75, 1.0, 2.0]), max_size=70).map(sorted)
values = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 0.5, 0.5000001, 0.8, 1.0, 2.0, 3.0]), max_size=12)
KINDS = {
    "numpy": lambda x: np.asarray(x, dtype=np.float64),
    "torch": lambda x: torch.tensor(x, dtype=torch.float64),
    "strict": lambda x: array_api_strict.asarray(x, dtype=array_api_strict.float64),
}


@pytest.mark.parametrize("kind", KINDS)
@given(where=places, x=values, right=st.booleans())
def test_the_search_counts(kind, where, x, right):
    count = [sum(p <= v if right else p < v for p in where) for v in x]
    p, v = KINDS[kind](where), KINDS[kind](x)
    xp = namespace_of(p)
    assert np.asarray(xp.searchsorted(p, v, right=right)).tolist() == count
    if where:
        assert np.asarray(xp.binary_search(p, v, right=right)).tolist() == count


@given(places, places, values)
def test_the_search_goes_row_by_row(first, second, x):
    m = min(len(first), len(second))
    if not m:
        return
    where = torch.tensor([first[:m], second[:m]])
    v = torch.tensor([x, x[::-1]]).reshape(2, len(x))
    xp = namespace_of(where)
    for right in (False, True):
        expected = torch.searchsorted(where, v, right=right)
        assert torch.equal(xp.binary_search(where, v, right=right), expected)
        numpy = namespace_of(np.zeros(1)).searchsorted(where.numpy(), v.numpy(), right=right)
        assert np.array_equal(numpy, expected.numpy())


def test_the_search_is_written_out_in_an_export():
    class Search(torch.nn.Module):
        def forward(self, x):
            return namespace_of(x).searchsorted(torch.tensor([0.1, 0.5]), x)

    program = torch.export.export(Search(), (torch.rand(4),))
    assert "searchsorted" not in str(program.graph)


@pytest.mark.parametrize("kind", KINDS)
def test_softplus_is_exact(kind):
    x = [-800.0, -30.0, -1.0, 0.0, 1.0, 19.0, 25.0, 800.0]
    expected = [math.log1p(math.exp(-abs(v))) + max(v, 0.0) for v in x]
    array = KINDS[kind](x)
    assert np.asarray(namespace_of(array).softplus(array)).tolist() == expected


def test_the_gradient_of_softplus_is_the_sigmoid():
    x = torch.tensor([-800.0, -1.0, 0.0, 1.0, 800.0], dtype=torch.float64, requires_grad=True)
    namespace_of(x).softplus(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.sigmoid(x.detach()))
