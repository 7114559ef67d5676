"""Networks of timm by name, with a stand-in for the library where it is not to be had."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from trueup.models import mc_dropout
from trueup_studies.registry import NETWORKS
from trueup_studies.timm_networks import timm_network

X = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Stand(nn.Module):
    """Divided as timm's networks are, with a dropout of its own that is no layer, and `head` a layer."""

    def __init__(self, classes, channels, drop_rate=0.0):
        super().__init__()
        self.stem = nn.Conv2d(channels, 6, 3)
        self.head = nn.Linear(6, classes)
        self.extra = nn.Linear(6, 6)  # after the classifier in order, though not in use
        self.asked = []

    def get_classifier(self):
        return self.head

    def forward_features(self, x):
        self.asked.append(len(x))
        return self.stem(x)

    def forward_head(self, x, pre_logits=False):
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.head(pooled)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


@pytest.fixture
def timm(monkeypatch):
    found = ModuleType("timm")
    found.calls = []

    def create_model(name, pretrained=False, num_classes=None, in_chans=None):
        found.calls.append((name, pretrained))
        return Stand(num_classes, in_chans)

    found.create_model = create_model
    found.list_models = lambda: ["resnet18", "resnet34", "vit_tiny_patch16_224"]
    found.is_model = lambda name: name.partition(".")[0] in found.list_models()
    monkeypatch.setitem(sys.modules, "timm", found)
    return found


def test_a_network_has_the_classes_and_channels_asked_for_and_comes_from_its_seed(timm):
    before = torch.get_rng_state()
    net, again, other = (timm_network("resnet18.a1_in1k", 7, channels=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert net(X).shape == (5, 7)
    assert torch.equal(net.stem.weight, again.stem.weight)
    assert not torch.equal(net.stem.weight, other.stem.weight)
    timm_network("hf-hub:someone/net", 2, channels=1, pretrained=True)
    assert timm.calls[-1] == ("hf-hub:someone/net", True)


def test_its_head_alone_is_repeated_by_monte_carlo_dropout(timm):
    net = timm_network("resnet18", 4, dropout=0.5).eval()
    assert not hasattr(net.extra, "dropout")
    samples = mc_dropout(net, X, 8)
    assert samples.shape == (8, 5, 4)
    assert len(samples.unique(dim=0)) == 8
    assert net.asked == [1, 1, 5]  # one row to see how it is divided, then every row once
    plain = net(X)
    slow = torch.stack([mc_dropout(net, X, 1, seed=seed)[0] for seed in range(400)])
    assert torch.allclose(slow.mean(dim=0), plain, atol=0.06)


def test_features_that_draw_are_repeated_too(timm):
    net = timm_network("resnet18", 4, dropout=0.5).eval()
    net.stem = nn.Sequential(net.stem, nn.Dropout(0.3))
    net.asked.clear()
    assert mc_dropout(net, X, 8).shape == (8, 5, 4)
    assert net.asked[-1] == 40


def test_it_is_among_the_networks_by_name(timm):
    assert "timm:resnet18" in NETWORKS
    assert "timm:resnet18" not in list(NETWORKS)
    assert "tim:resnet18" not in NETWORKS
    make = NETWORKS["timm:resnet34"]
    assert {"classes", "channels", "dropout", "seed"} <= set(inspect.signature(make).parameters)
    assert make(3, dropout=0.1)(X).shape == (5, 3)
    assert timm.calls == [("resnet34", False)]


def test_a_name_that_timm_does_not_have_is_answered_with_others(timm):
    with pytest.raises(ValueError, match="must be a network of timm, such as resnet18, .*, got 'resnet1'"):
        timm_network("resnet1")


@pytest.mark.parametrize("broken", [None, RuntimeError("operator torchvision::nms does not exist")], ids=["no", "bad"])
def test_without_timm_the_error_names_the_extra(monkeypatch, broken):
    def failing(name):
        raise broken

    if broken is None:
        monkeypatch.setitem(sys.modules, "timm", None)
    else:
        monkeypatch.setattr("trueup_studies.timm_networks.import_module", failing)
    with pytest.raises(ImportError, match=r"pip install 'trueup-studies\[vision\]' \((import of timm halted|operator)"):
        NETWORKS["timm:resnet18"](10)
