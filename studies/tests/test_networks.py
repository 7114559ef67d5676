import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trueup.models.networks import _MaxPool2d
from trueup_studies import networks
from trueup_studies.networks import (
    CNN,
    MLP,
    Normalise,
    ResNet,
    WideResNet,
    build_network,
    load_weights,
    network_options,
)
from trueup_studies.registry import NETWORKS

SMALL = {
    "resnet8": (lambda **o: networks.resnet8(5, channels=2, **o), (2, 16, 16)),
    "wrn10x1": (lambda **o: WideResNet(10, 1, 5, channels=2, **o), (2, 16, 16)),
    "cnn": (lambda **o: CNN(5, channels=2, width=8, **o), (2, 9, 7)),
    "cnn, no batch-norm": (lambda **o: CNN(5, channels=2, width=8, batch_norm=False, **o), (2, 9, 7)),
    "mlp": (lambda **o: MLP(5, inputs=6, hidden=(8, 7), **o), (6,)),
}


@pytest.fixture(params=SMALL)
def small(request):
    make, shape = SMALL[request.param]
    return make, torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))


def size(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (networks.resnet8, 75290),
        (networks.resnet20, 269722),
        (networks.resnet32, 464154),
        (networks.resnet110, 1727962),
        (networks.wrn16x4, 2748890),
    ],
)
def test_parameters_as_published(make, parameters):
    assert size(make()) == parameters


def test_wide_parameters_as_published():
    with torch.device("meta"):
        assert size(networks.wrn28x10(100)) == 36536884


def test_depth_counts_layers():
    """Shortcuts are convolutions in the wide network's count, and the last linear layer is not in it."""
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in ResNet(14).modules()) == 14
    assert sum(isinstance(m, nn.Conv2d) for m in WideResNet(22, 2).modules()) == 22


@pytest.mark.parametrize(("kind", "bad", "rest"), [(ResNet, 2, 2), (ResNet, 21, 2), (WideResNet, 28 + 2, 4)])
def test_depth_refused(kind, bad, rest):
    with pytest.raises(ValueError, match=re.escape(f"depth must be 6n + {rest} with n ≥ 1, got {bad}")):
        kind(bad, 1)


def test_output_is_head_of_trunk(small):
    make, x = small
    network = make().eval()
    assert network(x).shape == (4, 5)
    assert network.head(network.trunk(x)).equal(network(x))
    assert torch.isfinite(network(x)).all()


def test_all_randomness_is_in_the_head(small):
    make, x = small
    network = make(dropout=0.5).eval()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.random.fork_rng(devices=[]):
        assert network.trunk(x).equal(network.trunk(x))
        features = network.trunk(x)
        assert not network.head(features).equal(network.head(features))
    network.eval()
    assert network(x).equal(network(x))


def test_dropout_leaves_names_alone(small):
    make, x = small
    plain, dropped = make(), make(dropout=0.3)
    dropped.load_state_dict(plain.state_dict())
    assert dropped.eval()(x).equal(plain.eval()(x))
    assert any(isinstance(m, nn.Dropout) and m.p == 0.3 for m in dropped.modules())


def test_weights_come_from_the_seed_alone(small):
    make, x = small
    before = torch.random.get_rng_state()
    one, same, other = (make(seed=seed).eval()(x) for seed in (3, 3, 4))
    assert torch.random.get_rng_state().equal(before)
    assert one.equal(same)
    assert not torch.allclose(one, other)


def test_weights_are_scaled_by_fan_in():
    network = CNN(channels=50, width=64)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
        elif isinstance(layer, nn.BatchNorm2d):
            assert layer.running_var.equal(torch.ones(layer.num_features))
            assert layer.weight.equal(torch.ones(layer.num_features))
            assert layer.num_batches_tracked == 0


def test_gradients_reach_every_weight(small):
    make, x = small
    network = make().train()
    network(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_without_batch_norm_samples_are_independent():
    network, x = CNN(channels=1, width=4, batch_norm=False).train(), torch.rand(6, 1, 8, 8)
    torch.testing.assert_close(network(x)[:3], network(x[:3]))


@pytest.mark.parametrize("side", [1, 2, 3, 8, 28, 33])
def test_cnn_takes_any_size(side):
    assert CNN(3, channels=1, width=4).eval()(torch.rand(2, 1, side, side + 1)).shape == (2, 3)


def test_mlp_flattens_and_needs_a_layer():
    assert MLP(3, inputs=12, hidden=(4,)).eval()(torch.rand(5, 3, 2, 2)).shape == (5, 3)
    with pytest.raises(ValueError, match="hidden must name at least one"):
        MLP(3, inputs=4, hidden=())


def test_shortcut_pads_with_zeros_and_keeps_every_second_pixel():
    block = networks.ResNet(8).layer2[0].eval()
    with torch.no_grad():
        block.bn2.weight.zero_()  # the residual vanishes
        x = torch.rand(1, 16, 4, 4)
        out = block(x)
    assert out.shape == (1, 32, 2, 2)
    assert out[:, 8:24].equal(x[:, :, ::2, ::2])
    assert out[:, :8].abs().sum() == out[:, 24:].abs().sum() == 0


def test_wide_network_by_steps():
    """The published order, written out: normalise, activate, convolve; shortcuts start from the activation."""
    network = WideResNet(10, 2, 5, dropout=0.5, seed=3).eval()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    out = network.trunk(x)
    for block, side in zip(network.head[:3], (16, 8, 4), strict=True):
        active = block.bn1(out).relu()
        out = block.conv2(block.bn2(block.conv1(active)).relu()) + block.shortcut(active)
        assert out.shape[2:] == (side, side)
    out = network.head[3](out).relu().mean((2, 3))
    torch.testing.assert_close(network.head[-1](out), network(x))


def test_normalise():
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    out = Normalise()(x)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out[:, 1], (x[:, 1] - 0.456) / 0.224, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(Normalise()(x[0]), out[0])
    for bad in ((0.1, 0.2), (0.1, 0.2, 0.0)):
        with pytest.raises(ValueError, match="std must have 3 positive numbers, one per mean"):
            Normalise(std=bad)


def test_load_strips_prefix_and_counters(tmp_path, small):
    make, x = small
    source, target = make(seed=1), make(seed=2).eval()
    state = {f"module.{k}": v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": state, "best_prec1": 9.0}, tmp_path / "w.th")
    assert load_weights(target, tmp_path / "w.th") is target
    assert target(x).equal(source.eval()(x))
    assert not target.training
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    assert load_weights(make(seed=2), str(tmp_path / "plain.pt")).eval()(x).equal(source(x))


@pytest.mark.parametrize("size", [(8, 6), (7, 9), (1, 2)])
def test_pooling_without_gradients_is_that_with_them(size):
    pool, images = _MaxPool2d(2, ceil_mode=True), torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(0))
    images[0, 0, 0, 0] = torch.nan
    assert torch.allclose(pool(images), pool(images.clone().requires_grad_()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("head.1.bias"), "must fit a MLP, got no head.1.bias$"),
        (lambda s: s.update(extra=torch.ones(1)), "got extra, which the network does not have$"),
        (lambda s: s.update({"head.1.bias": torch.ones(7)}), r"head.1.bias of shape \(7,\) where the network has \(2,"),
        (lambda s: s.clear(), "no trunk.1.weight; no trunk.1.bias; no head.1.weight, and 1 more differences$"),
        (lambda s: s.update(note="text"), "must hold a state dict of tensors, got a mapping of trunk.1.weight"),
    ],
)
def test_load_says_what_differs(tmp_path, change, message):
    network = MLP(2, inputs=3, hidden=(4,))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    state = {k: v + 1 for k, v in before.items()}
    change(state)
    torch.save(state, tmp_path / "w.th")
    with pytest.raises(ValueError, match=message):
        load_weights(network, tmp_path / "w.th")
    assert all(v.equal(before[k]) for k, v in network.state_dict().items())


def test_load_refuses_what_is_no_state_dict(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "w.th")
    with pytest.raises(ValueError, match="w.th must hold a state dict of tensors, got list"):
        load_weights(MLP(2, inputs=3), tmp_path / "w.th")


@pytest.mark.parametrize("make", [lambda: ResNet(8, channels=1), lambda: CNN(channels=1)])
def test_exports(make):
    network, x = make().eval(), torch.rand(2, 1, 8, 8)
    exported = torch.export.export(network, (x,)).module()
    torch.testing.assert_close(exported(x), network(x))


@pytest.mark.parametrize(("name", "count"), [("resnet20", 512), ("resnet32", 128)])
def test_real_weights_give_the_stored_logits(data, name, count):
    network = load_weights(getattr(networks, name)(), data / "weights" / f"cifar10_{name}.th").eval()
    stored = np.load(data / "logits" / f"cifar10_{name}.npz")
    index = np.load(data / "images" / "cifar10_test_split.npz")
    images = np.load(data / "images" / "cifar10_test.npz")["images"]
    for half in ("val", "test"):
        chosen = images[index[f"{half}_index"][: count // 2]]
        with torch.no_grad():
            logits = network(Normalise()(torch.from_numpy(chosen).permute(0, 3, 1, 2) / 255))
        np.testing.assert_allclose(logits.numpy(), stored[f"{half}_logits"][: count // 2], atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["image", "text", "characters", "tabular"])
def test_a_network_is_built_for_the_sizes_of_a_data_set(kind):
    sample = {
        "image": torch.rand(3, 8, 8),
        "text": torch.tensor([1, 4, 0]),
        "characters": torch.tensor([1, 4, 2]),
        "tabular": torch.rand(13),
    }[kind]
    words = tuple("abcdef") if kind in ("text", "characters") else ()
    data = SimpleNamespace(name="few", kind=kind, train=[(sample, 0)], classes=tuple("abcdef"), vocabulary=words)
    name = {"image": "cnn", "text": "text_cnn", "characters": "char_transformer", "tabular": "mlp"}[kind]
    options = network_options(name, data, seed=3)
    normalisation = ((0.5,) * 3, (0.25,) * 3) if kind == "image" else None
    network = build_network(name, options, normalisation=normalisation).eval()
    assert network(sample[None]).shape[-1] == 6
    plain = network if normalisation is None else network[1]
    again = NETWORKS[name](**options).eval()
    assert all(a.equal(b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    assert network_options(name, data, outputs=2, seed=3) == {**options, next(iter(options)): 2}
    other = "text_cnn" if kind != "text" else "cnn"
    with pytest.raises(ValueError, match=f"{other} is not for .* such as few"):
        network_options(other, data)
