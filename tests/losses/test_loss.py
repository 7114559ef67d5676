"""The machinery that all losses share, and its door."""

import numpy as np
import pytest
import torch
from torch import nn

from trueup.losses import Focal, LabelSmoothing, Loss, focal, per_sample

Z = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
Y = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (Z, torch.tensor([0, 3]), r"labels must lie in 0..2 or be ignore_index -100, got 0..3"),
        (Z, torch.tensor([0, -1]), r"labels must lie in 0..2 or be ignore_index -100, got -1..0"),
        (Z, torch.tensor([0]), r"labels must have shape \(2,\) for logits \(2, 3\), got \(1,\)"),
        (Z, torch.tensor([0.0, 1.0]), "labels must be integers, got float32"),
        (Z, torch.zeros(2, 3), "labels of the logits' shape must be probabilities that sum to 1"),
        (Z, torch.tensor([True, False]), "labels must be integers, got bool"),
        (Z[0], Y[0], r"logits must have shape \(N, K\) or \(N, K, d…\) with K at least 2, got \(3,\)"),
        (Z[:, :1], Y, r"with K at least 2, got \(2, 1\)"),
        (Z.long(), Y, "logits must be floating point, got int64"),
        (Z.numpy(), Y, "logits and labels must be tensors, got ndarray, Tensor"),
        (torch.zeros(2, 3, 4), Y, r"labels must have shape \(2, 4\) for logits \(2, 3, 4\), got \(2,\)"),
    ],
)
def test_the_door_says_what_it_wanted(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        Focal()(logits, labels)
    with pytest.raises(ValueError, match=message.replace(" or be ignore_index -100", "")):
        focal(logits, labels)


def test_functions_take_rows_alone():
    with pytest.raises(ValueError, match=r"must have shape \(n, K\), got \(2, 3, 4\); the Module takes more"):
        focal(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integer_type(dtype):
    assert torch.equal(Focal()(Z, Y.to(dtype)), Focal()(Z, Y))


def test_bad_common_options_are_named():
    with pytest.raises(ValueError, match='reduction must be "mean", "sum" or "none", got \'average\''):
        Focal(reduction="average")
    for weight in ([[1.0]], [-1.0, 1.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="weight must be a vector of finite numbers"):
            Focal(weight=weight)
    with pytest.raises(ValueError, match="weight must have 3 entries, one per class, got 2"):
        Focal(weight=[1.0, 2.0])(Z, Y)


def test_weight_is_a_buffer_of_its_own():
    weight = torch.ones(3)
    loss = Focal(weight=weight)
    weight[0] = 5
    assert loss.weight.tolist() == [1, 1, 1]
    assert loss.double().weight.dtype == torch.float64
    assert Focal(weight=np.ones(3)).weight.dtype == torch.float64


def test_options_may_change_between_steps():
    loss = Focal(gamma=3.0)
    loss.gamma = 0.0
    assert loss(Z, Y) == nn.CrossEntropyLoss()(Z, Y)


def test_a_row_of_weight_zero_leaves_the_mean():
    loss = Focal(weight=[1.0, 1.0, 0.0])
    torch.testing.assert_close(loss(Z, Y), Focal()(Z[:1], Y[:1]))


def test_weights_are_repetitions():
    z, y = torch.cat([Z, Z]), torch.tensor([0, 2, 1, 0])
    repeated = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3])  # class 0 three times, 1 twice, 2 once
    torch.testing.assert_close(Focal(weight=[3, 2, 1])(z, y), Focal()(z[repeated], y[repeated]))


def test_smoothing_with_weights_is_torchs():
    for reduction in ("mean", "sum", "none"):
        common = {"weight": torch.tensor([0.5, 2.0, 1.0]), "ignore_index": 2, "reduction": reduction}
        torch.testing.assert_close(
            LabelSmoothing(smoothing=0.3, **common)(Z, Y), nn.CrossEntropyLoss(label_smoothing=0.3, **common)(Z, Y)
        )


def test_a_new_loss_is_a_function_and_a_line():
    @per_sample()
    def error(logits, labels, *, scale: float = 2.0):
        return scale * (1 - torch.softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1))

    class Error(Loss, function=error):
        """An expected error."""

    class Renamed(Error):
        """A subclass is the same loss."""

    assert repr(Error()) == "Error(scale=2.0, reduction=mean)"
    assert not Error.per_batch
    assert Error.neutral is None
    torch.testing.assert_close(Renamed(scale=1.0)(Z, Y), error(Z, Y).mean() / 2)


def test_a_class_may_be_the_ignored_one():
    z = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    result = Focal(ignore_index=0)(z, torch.tensor([0, 2, 1]))
    assert result.item() == pytest.approx(Focal()(z[1:], torch.tensor([2, 1])).item())
    with pytest.raises(ValueError, match=r"0..2 or be ignore_index -100, got -200..1"):
        Focal()(z, torch.tensor([-100, -200, 1]))
    with pytest.raises(ValueError, match=r"0..2 or be ignore_index -100, got -200..1"):
        Focal()(z, torch.tensor([0, -200, 1]))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_mean_is_the_sum_over_the_number_to_the_bit(kind):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 128, 1000):
        z = torch.randn(n, 10, generator=generator, dtype=kind) * 3
        y = torch.randint(10, (n,), generator=generator)
        assert torch.equal(Focal()(z, y), Focal(reduction="sum")(z, y) / n)


def test_options_that_are_no_numbers_are_named():
    for value in ("a", None):
        with pytest.raises(ValueError, match=f"gamma must be a number of at least 0, got {value!r}"):
            Focal(gamma=value)


def test_logits_with_the_classes_last_get_a_hint():
    with pytest.raises(ValueError, match=r"got \(2, 7\); if the classes are last, logits.movedim\(-1, 1\)"):
        Focal()(torch.zeros(2, 7, 5), torch.zeros(2, 7, dtype=torch.int64))
