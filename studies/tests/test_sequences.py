import pytest
import torch
from torch import nn

from trueup_studies.sequences import CharTransformer, TextCNN


def text(**options):
    return TextCNN(3, **{"vocabulary": 20, "width": 8, **options})


def book(**options):
    return CharTransformer(7, **{"context": 12, "width": 8, "heads": 2, "layers": 3, **options})


def tokens(n, length, high, seed=0):
    return torch.randint(1, high, (n, length), generator=torch.Generator().manual_seed(seed))


MAKERS = pytest.mark.parametrize(("make", "x"), [(text, tokens(4, 9, 20)), (book, tokens(4, 9, 7))])


@MAKERS
def test_trunk_then_head_and_seeds(make, x):
    before = torch.random.get_rng_state()
    network, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.random.get_rng_state().equal(before)
    out = network.eval()(x)
    assert out.equal(network.head(network.trunk(x)))
    assert out.equal(same.eval()(x))
    assert not out.equal(other.eval()(x))
    assert torch.isfinite(out).all()
    assert out.std() > 0


@MAKERS
def test_only_the_head_is_random(make, x):
    network = make(dropout=0.5).eval()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert network.trunk(x).equal(network.trunk(x))
        assert not network(x).equal(network(x))


@MAKERS
def test_names_of_weights_do_not_depend_on_dropout(make, x):
    assert make().state_dict().keys() == make(dropout=0.3).state_dict().keys()
    make().load_state_dict(make(dropout=0.3).state_dict())


@MAKERS
def test_exports_and_learns(make, x):
    network = make().eval()
    exported = torch.export.export(network, (x,)).module()
    torch.testing.assert_close(exported(x), network(x))
    optimiser = torch.optim.Adam(network.train().parameters(), lr=1e-2)
    labels = torch.arange(4) % 3 if make is text else x.roll(-1, dims=1)

    def loss():
        z = network(x)
        return nn.functional.cross_entropy(z.flatten(0, -2), labels.flatten())

    start = loss().item()
    for _ in range(40):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss().item() < start / 3
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_text_has_eight_layers():
    layers = [m for m in text().modules() if isinstance(m, nn.Conv1d | nn.Linear)]
    assert len(layers) == 8


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5, 9, 16])
def test_padding_changes_nothing(batch_norm, length):
    network = text(batch_norm=batch_norm)
    for module in network.modules():  # a shift that would show if it leaked out of the padding
        if isinstance(module, nn.BatchNorm1d | nn.Conv1d) and module.bias is not None:
            nn.init.constant_(module.bias, 0.7)
    x = tokens(3, length, 20)
    short = network.eval()(x)
    for more in (1, 3, 11):
        torch.testing.assert_close(network(nn.functional.pad(x, (0, more))), short)
    assert not network(tokens(3, length, 20, seed=1)).equal(short)


def test_embedding_of_padding_stays_zero():
    network = text()
    assert network.embedding.weight[0].abs().sum() == 0
    network(torch.tensor([[3, 0, 0]] * 2)).sum().backward()
    assert network.embedding.weight.grad[0].abs().sum() == 0


def test_no_character_sees_the_next():
    network, x = book().eval(), tokens(2, 9, 7)
    before = network(x)
    for place in range(9):
        changed = x.clone()
        changed[:, place] = (changed[:, place] + 1) % 7
        after = network(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])
    torch.testing.assert_close(network(x[:, :4]), before[:, :4])


def test_places_matter_and_end():
    network = book().eval()
    same = torch.full((1, 12), 3)
    assert not torch.allclose(network(same)[0, 0], network(same)[0, 5])
    with pytest.raises(ValueError, match="tokens must have at most 12 positions, got 13"):
        network(tokens(1, 13, 7))
    with pytest.raises(ValueError, match="width must be a multiple of heads, 3, got 8"):
        book(heads=3)
    with pytest.raises(ValueError, match=r"random_layers must lie in 0..3, the number of layers, got 4"):
        book(random_layers=4)


@pytest.mark.parametrize("random_layers", [0, 1, 3])
def test_random_layers_are_those_of_the_head(random_layers):
    network = book(random_layers=random_layers, dropout=0.2)
    found = [name for name, m in network.named_modules() if isinstance(m, nn.Dropout)]
    assert len(found) == max(3 * random_layers, 1)
    assert all(name.startswith("head.") for name in found)


def test_long_texts_are_cut():
    network = TextCNN(4, vocabulary=50, width=8, length=5).eval()
    tokens = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(tokens), network(tokens[:, :5]))
    assert not torch.equal(network(tokens), network(tokens[:, 4:]))
