"""Whatever happens inside of `frozen`, the model and the global random states are the same to the bit afterwards."""

import copy
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from trueup.models import frozen

X = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Restless(nn.Module):
    """Changes its buffers whenever it is called, whatever its mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.tensor([0.0, float("nan"), -0.0]))
        self.register_buffer("anew", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("unset", None)
        self.register_buffer("growing", torch.zeros(1))

    def forward(self, x):
        self.in_place.add_(1)
        self.anew = self.anew + 1
        self.passing.data.mul_(-1)
        self.unset = torch.ones(1)
        self.growing.data = torch.ones(len(self.growing) + 1)
        if "more" not in self._buffers:
            self.register_buffer("more", torch.ones(1), persistent=False)
        return x


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.instance = nn.InstanceNorm2d(4, track_running_stats=True)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(64, 3)
        self.restless = Restless()

    def forward(self, x):
        x = self.restless(self.drop(self.instance(self.norm(self.conv(x)))))
        return self.head(x.flatten(1))


def lived_in():
    """A network as one is result in the middle of training: mixed modes, some of it fixed, gradients, hooks."""
    model = Network().train()
    model.conv.eval()
    model.drop.eval()
    model.norm.weight.requires_grad = False
    torch.manual_seed(7)
    model(X).sum().backward()
    model.head.bias.grad = None
    model.handles = [
        model.norm.register_forward_hook(lambda *inputs: None),
        model.norm.register_forward_pre_hook(lambda *inputs, **keywords: None, with_kwargs=True),
        model.head.register_forward_hook(lambda *inputs: None, always_call=True),
        model.head.register_full_backward_hook(lambda *inputs: None),
        model.head.register_state_dict_pre_hook(lambda *inputs: None),
    ]
    return model


def photograph(model):
    """Everything that must stay, by value and by identity."""
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "parameters": {
            name: (id(p), p.requires_grad, p.detach().numpy().tobytes(), id(p.grad), _bits(p.grad), p._version)
            for name, p in model.named_parameters()
        },
        "buffers": {
            (name, key): (id(b), _bits(b), b is None or b.shape, b is None or b.dtype)
            for name, module in model.named_modules()
            for key, b in module._buffers.items()
        },
        "order": [list(module._buffers) for module in model.modules()],
        "kept": {name: sorted(module._non_persistent_buffers_set) for name, module in model.named_modules()},
        "hooks": {
            (name, key): (id(value), list(value.items()))
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        },
        "kinds of hooks": [module._is_full_backward_hook for module in model.modules()],
        "state": [(key, _bits(value)) for key, value in model.state_dict().items()],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
    }


def _bits(tensor):
    return None if tensor is None else tensor.detach().view(-1).view(torch.uint8).numpy().tobytes()


def misbehave(model):
    """All that a body could do to the model and the world."""
    model(X)
    model.train()
    model(X)
    model.norm.running_mean.zero_()
    for parameter in model.parameters():
        parameter.requires_grad = True
    model(X).sum().backward()
    for handle in model.handles[:2]:
        handle.remove()
    model.conv.register_forward_hook(lambda *inputs: None)
    model.conv.register_buffer("extra", torch.ones(1), persistent=False)
    model.restless.register_buffer("passing", torch.ones(1))
    model.conv.register_full_backward_hook(lambda *inputs: None)
    model.conv.register_load_state_dict_post_hook(lambda *inputs: None)
    torch.rand(3)
    np.random.rand(3)  # noqa: NPY002
    random.random()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_all_is_as_it_was(error):
    model = lived_in()
    before = photograph(model)
    assert set(before["modes"].values()) == {True, False}

    def body():
        with frozen(model):
            misbehave(model)
            assert photograph(model)["buffers"] != before["buffers"]
            if error:
                raise error("in the body")

    if error:
        with pytest.raises(error):
            body()
    else:
        body()
    after = photograph(model)
    for what, value in before.items():
        assert after[what] == value, what


def test_inside_all_is_still():
    model = lived_in()
    with frozen(model):
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(model(X), model(X)), "dropout or batch statistics are at work"
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None


def test_a_hook_that_was_there_can_still_be_removed():
    model = lived_in()
    with frozen(model):
        model.norm.register_forward_hook(lambda *inputs: None)
    model.handles[0].remove()
    assert not model.norm._forward_hooks


def test_frozen_in_frozen():
    model = lived_in()
    before = photograph(model)
    with frozen(model):
        with frozen(model):
            model(X)
        assert not model.training
        assert not model.head.weight.requires_grad
    assert photograph(model) == before


def test_gradients_that_the_caller_waits_for():
    model = Network()
    model.restless = nn.Identity()
    expected = copy.deepcopy(model)
    torch.manual_seed(1)
    expected(X).square().sum().backward()
    torch.manual_seed(1)
    loss = model(X).square().sum()
    with frozen(model):
        model(X)
    loss.backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_waits_at_a_parameter_for_its_gradient():
    model, seen = nn.Linear(2, 2), []
    model.weight.register_post_accumulate_grad_hook(seen.append)
    with frozen(model):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1


def test_modes_are_set_without_a_word_to_the_model():
    class Folding(nn.Linear):
        def train(self, mode=True):
            self.weight.data.mul_(2)  # as some models fold weights into each other
            return super().train(mode)

    model = Folding(2, 2)
    before = model.weight.detach().clone()
    with frozen(model):
        assert torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def test_buffers_that_are_sparse_or_shared():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sparse", torch.eye(3).to_sparse())
            self.register_buffer("one", torch.ones(4))
            self.register_buffer("part", self.one[:2])

    model = Graph()
    with frozen(model), suppress(ZeroDivisionError):
        model.sparse.mul_(5)
        model.one.zero_()
        raise ZeroDivisionError
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))
    assert torch.equal(model.one, torch.ones(4))
    assert model.part.data_ptr() == model.one.data_ptr()


def test_a_lazy_model_is_asked_for_its_shapes():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"model must have all its shapes, got lazy 0\.weight, 0\.bias; call it once"):
        frozen(model).__enter__()
    assert model.training
