"""Laws that every loss obeys, run over the Modules of trueup.losses."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from optional import nn, torch
from strategies import calibrated, pairs
from trueup import LOSSES, losses

OPTIONS = {
    "label_smoothing": {"smoothing": st.floats(0, 1)},
    "norm": {"strength": st.floats(0, 1), "order": st.sampled_from([1.0, 1.5, 2.0, 3.0])},
    "focal": {"gamma": st.sampled_from([0.0, 0.5, 1.0, 3.0])},
    "inverse_focal": {"gamma": st.floats(0, 3.5)},
    "dual_focal": {"gamma": st.sampled_from([0.0, 0.5, 1.0, 5.0])},
    "entropy_penalty": {"strength": st.floats(0, 1)},
    "mmce": {"strength": st.floats(0, 5), "bandwidth": st.sampled_from([0.02, 0.4, 3.0])},
    "mmce_weighted": {"strength": st.floats(0, 5), "bandwidth": st.sampled_from([0.02, 0.4, 3.0])},
    "avuc": {"strength": st.floats(0, 3), "threshold": st.floats(0, 1.5)},
    "dca": {"strength": st.floats(0, 10)},
    "soft_binned_ece": {
        "strength": st.floats(0, 3),
        "bins": st.integers(1, 15),
        "temperature": st.sampled_from([0.01, 0.1]),
        "order": st.sampled_from([1.0, 2.0, 3.0]),
    },
}
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])

names = pytest.mark.parametrize("name", LOSSES)
per_sample_names = pytest.mark.parametrize("name", [n for n, kind in LOSSES.items() if not kind.per_batch])


def batch(n=24, classes=4, dtype=torch.float64, seed=0):
    logits, labels = calibrated(n, classes, temperature=1.7, scale=1.5, seed=seed)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def gradient(loss, logits, labels):
    z = logits.detach().clone().requires_grad_()
    loss(z, labels).sum().backward()
    return z.grad


def close(one, other, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol, check_dtype=False)


@names
def test_function_takes_the_pair_and_then_keywords(name):
    function = LOSSES[name].function
    first, second, *others = inspect.signature(function).parameters.values()
    assert (first.name, second.name) == ("logits", "labels")
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)
    assert ">>>" in function.__doc__
    assert "Do not use " in " ".join(function.__doc__.split())  # each loss says when another is better
    common = ["weight", "ignore_index", "reduction"]
    assert list(inspect.signature(LOSSES[name]).parameters) == [p.name for p in others] + common
    assert getattr(losses, name) is function


@names
@given(pair=pairs(max_rows=12), data=st.data())
def test_it_equals_the_slow_loop(name, pair, data):
    logits, labels = pair
    options = {**LOSSES[name].defaults, **{k: data.draw(v, k) for k, v in OPTIONS.get(name, {}).items()}}
    options.pop("detach_weight", None)  # changes the gradient alone
    if name == "flsd53":
        probs = reference.softmax(logits)[np.arange(len(labels)), labels]
        labels = labels[abs(probs - 0.2) > 1e-9]  # on the step itself rounding decides
        logits = logits[abs(probs - 0.2) > 1e-9]
    found = LOSSES[name].function(torch.from_numpy(logits), torch.from_numpy(labels), **options)
    assert found.shape == (len(labels),)
    # The root of a squared kernel error has a floor of 1e-5.
    atol = 1e-5 * options["strength"] + 1e-9 if "mmce" in name else 1e-9
    np.testing.assert_allclose(found, reference.losses(name, logits, labels, **options), rtol=1e-9, atol=atol)


@names
def test_gradient_is_that_of_the_value(name):
    logits, labels = batch(n=7)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name].function(z, labels), logits.requires_grad_())
    module = LOSSES[name](weight=WEIGHT, ignore_index=2)
    assert torch.autograd.gradcheck(lambda z: module(z, labels), logits)


@pytest.mark.parametrize("name", [n for n, kind in LOSSES.items() if kind.neutral is not None])
@pytest.mark.parametrize(("reduction", "weight"), [("mean", WEIGHT), ("sum", None), ("none", WEIGHT)])
def test_neutral_setting_is_cross_entropy(name, reduction, weight):
    logits, labels = batch()
    labels[::5] = -7
    common = {"weight": weight, "ignore_index": -7, "reduction": reduction}
    ours = LOSSES[name](**LOSSES[name].neutral, **common)
    if weight is not None:
        common["weight"] = weight.double()
    theirs = nn.CrossEntropyLoss(**common)
    close(ours(logits, labels), theirs(logits, labels))
    close(gradient(ours, logits, labels), gradient(theirs, logits, labels))


@names
@pytest.mark.parametrize(("dtype", "classes"), [(torch.float32, 2), (torch.float64, 10), (torch.bfloat16, 10)])
def test_extreme_logits_are_finite(name, dtype, classes):
    rng = np.random.default_rng(0)
    rows = [rng.choice([-1e4, 1e4], size=classes) for _ in range(20)]
    rows += [np.zeros(classes), np.full(classes, 1e4), np.full(classes, -1e4)]
    rows += list(1e4 * np.eye(classes) - 5e3) + list(-1e4 * np.eye(classes))
    logits = torch.tensor(np.array(rows), dtype=dtype)
    for labels in (logits.argmax(dim=1), logits.argmin(dim=1), torch.tensor(rng.integers(0, classes, len(rows)))):
        values = LOSSES[name].function(logits, labels)
        assert values.isfinite().all()
        assert gradient(LOSSES[name](reduction="sum"), logits, labels).isfinite().all()
        for i in range(0, len(rows) if LOSSES[name].per_batch else 0, 4):  # a batch of one
            assert gradient(LOSSES[name](), logits[i : i + 1], labels[i : i + 1]).isfinite().all()


@names
def test_half_precision_is_computed_in_single(name):
    logits, labels = batch(n=64, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = logits.to(dtype)
        found = LOSSES[name]()(rounded, labels)
        assert found.dtype == torch.float32
        close(found, LOSSES[name]()(rounded.float(), labels), rtol=0, atol=0)
        assert gradient(LOSSES[name](), rounded, labels).dtype == dtype


@names
def test_autocast_trains(name):
    torch.manual_seed(0)
    logits, labels = batch(n=64, dtype=torch.float32)
    layer = nn.Linear(4, 4)
    loss = LOSSES[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(layer(logits), labels)
    inside.backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(logits)
    assert out.dtype == torch.bfloat16
    layer.zero_grad()
    outside = loss(out.float(), labels)
    outside.backward()
    assert inside.dtype == torch.float32
    close(inside, outside, rtol=0, atol=0)  # no step of ours falls back to half precision
    for one, other in zip(grads, layer.parameters(), strict=True):
        assert one.isfinite().all()
        close(one, other.grad, rtol=1e-6, atol=1e-7)


@names
def test_reductions_agree(name):
    logits, labels = batch()
    for weight, mass in ((None, len(labels)), (WEIGHT, WEIGHT[labels].sum())):
        none, total, mean = (LOSSES[name](weight=weight, reduction=r)(logits, labels) for r in ("none", "sum", "mean"))
        assert none.shape == labels.shape
        close(none.sum(), total)
        close(total / mass, mean)
        assert mean.dtype == torch.float64


@names
@pytest.mark.parametrize(
    ("reduction", "weight", "ignore_index"), [("mean", WEIGHT, -100), ("sum", None, 1), ("none", WEIGHT, 255)]
)
def test_ignored_rows_count_for_nothing(name, reduction, weight, ignore_index):
    logits, labels = batch()
    labels[::3] = ignore_index
    kept = labels != ignore_index
    loss = LOSSES[name](weight=weight, ignore_index=ignore_index, reduction=reduction)
    found, wanted = loss(logits, labels), loss(logits[kept], labels[kept])
    if reduction == "none":
        assert (found[~kept] == 0).all()
        found = found[kept]
    close(found, wanted)
    slope = gradient(loss, logits, labels)
    assert (slope[~kept] == 0).all()
    close(slope[kept], gradient(loss, logits[kept], labels[kept]))


@names
def test_a_batch_of_ignored_rows_is_as_torch_has_it(name):
    logits, labels = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.full((3,), -100)
    assert LOSSES[name](reduction="sum")(logits, labels) == 0
    assert LOSSES[name]()(logits, labels).isnan()
    assert nn.CrossEntropyLoss()(logits, labels).isnan()
    assert (gradient(LOSSES[name](reduction="sum"), logits, labels) == 0).all()
    assert LOSSES[name].function(logits[:0], labels[:0]).shape == (0,)


@names
def test_weight_multiplies_a_row_by_the_weight_of_its_label(name):
    logits, labels = batch()
    plain, weighted = (LOSSES[name](weight=w, reduction="none")(logits, labels) for w in (None, WEIGHT))
    if name == "label_smoothing":
        smoothing = LOSSES[name].defaults["smoothing"]
        wanted = nn.CrossEntropyLoss(weight=WEIGHT.double(), label_smoothing=smoothing, reduction="none")
        close(weighted, wanted(logits, labels))
    else:
        close(weighted, plain * WEIGHT[labels])
    close(LOSSES[name](weight=[1, 1, 1, 1])(logits, labels), LOSSES[name]()(logits, labels))
    close(LOSSES[name](weight=5 * WEIGHT)(logits, labels), LOSSES[name](weight=WEIGHT)(logits, labels))


@names
@pytest.mark.parametrize(
    ("reduction", "shape"), [("mean", (6, 4, 5)), ("none", (2, 4, 3, 5)), ("sum", (2, 4, 1, 3, 2))]
)
def test_further_dimensions_equal_the_flattened_form(name, reduction, shape):
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=shape))
    labels = torch.tensor(rng.integers(0, 4, size=shape[:1] + shape[2:]))
    labels[0, 0] = -100
    loss = LOSSES[name](weight=WEIGHT, reduction=reduction)
    flat = logits.movedim(1, -1).reshape(-1, 4)
    found = loss(logits, labels)
    assert found.shape == (labels.shape if reduction == "none" else ())
    close(found.reshape(-1), loss(flat, labels.reshape(-1)).reshape(-1))
    slope = gradient(loss, logits, labels).movedim(1, -1).reshape(-1, 4)
    close(slope, gradient(loss, flat, labels.reshape(-1)))


@names
def test_renaming_classes_renames_the_gradient(name):
    logits, labels = batch()
    order = torch.tensor([2, 0, 3, 1])
    renamed = torch.argsort(order)[labels]
    one, other = LOSSES[name](weight=WEIGHT), LOSSES[name](weight=WEIGHT[order])
    close(other(logits[:, order], renamed), one(logits, labels))
    close(gradient(other, logits[:, order], renamed), gradient(one, logits, labels)[:, order])


@names
def test_order_of_rows_does_not_matter(name):
    logits, labels = batch()
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(labels)))
    function = LOSSES[name].function
    close(function(logits[order], labels[order]), function(logits, labels)[order])
    loss = LOSSES[name]()
    close(gradient(loss, logits[order], labels[order]), gradient(loss, logits, labels)[order])


@names
def test_rows_see_each_other_only_where_declared(name):
    logits, labels = batch()
    function = LOSSES[name].function
    alone = torch.cat([function(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
    together = function(logits, labels)
    if LOSSES[name].per_batch:
        assert (alone - together).abs().max() > 1e-3
    else:
        close(alone, together)


@names
def test_module_survives_copies_and_says_what_it_is(name):
    logits, labels = batch()
    loss = LOSSES[name](weight=WEIGHT, ignore_index=255, reduction="sum")
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other(logits, labels) == loss(logits, labels)
    assert list(loss.state_dict()) == ["weight"]
    for text in [*loss.defaults, "weight=tensor(4)", "ignore_index=255", "reduction=sum"]:
        assert text in repr(loss)


@names
def test_inputs_are_untouched(name):
    logits, labels = batch()
    labels[3] = -100
    before = logits.clone(), labels.clone()
    LOSSES[name](weight=WEIGHT)(logits, labels)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


@names
def test_descent_fits_the_labels(name):
    """A loss whose gradient points the wrong way would not bring the labels to the top."""
    logits, labels = batch(n=60)
    z = logits.clone().requires_grad_()
    loss = LOSSES[name](reduction="sum")
    start = (z.argmax(dim=1) == labels).double().mean()
    optimiser = torch.optim.SGD([z], lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss(z, labels).backward()
        optimiser.step()
    assert (z.argmax(dim=1) == labels).double().mean() >= max(0.9, start + 0.1)


@per_sample_names
def test_it_compiles_to_one_graph(name):
    """Nothing looks at the values of a per-sample loss, so that neither a compiler nor a device must wait."""
    logits, labels = batch(dtype=torch.float32)
    labels[0] = -100
    loss = LOSSES[name](weight=WEIGHT)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    close(compiled(logits, labels), loss(logits, labels), rtol=1e-6, atol=1e-6)


BAD = {
    "gamma": [-1.0, math.nan, math.inf],
    "strength": [-0.1, math.nan],
    "smoothing": [-0.1, 1.1],
    "order": [0.5],
    "bandwidth": [0.0, -1.0],
    "threshold": [-0.5],
    "bins": [0, 2.5],
    "temperature": [0.0],
}


@names
def test_bad_options_are_named(name):
    logits, labels = batch()
    for option in LOSSES[name].defaults:
        for value in BAD.get(option, []):
            with pytest.raises(ValueError, match=f"{option} must .*got {value}"):
                LOSSES[name](**{option: value})
            with pytest.raises(ValueError, match=f"{option} must .*got {value}"):
                LOSSES[name].function(logits, labels, **{option: value})
    with pytest.raises(TypeError, match="has no option gama; it takes: .*ignore_index"):
        LOSSES[name](gama=1)
