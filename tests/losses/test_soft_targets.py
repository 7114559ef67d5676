"""Options by position, and probabilities of classes in the place of labels."""

import pytest
import torch
from torch.nn import functional as F

from trueup import losses

GENERATOR = torch.Generator().manual_seed(0)
Z = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.tensor([0, 1, 2, 3, 1, 0])
T = torch.softmax(torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR), dim=1)
W = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
SOFT = [
    losses.CrossEntropy(), losses.Brier(), losses.LabelSmoothing(0.1), losses.Norm(0.1, 2.0),
    losses.EntropyPenalty(0.2), losses.Focal(2.0), losses.FLSD53(), losses.DualFocal(3.0), losses.InverseFocal(1.0),
]  # fmt: skip


def test_options_are_taken_by_position():
    assert losses.Focal(2.0).gamma == 2.0
    assert (losses.Norm(0.1, 2.0).strength, losses.Norm(0.1, 2.0).order) == (0.1, 2.0)
    assert losses.Focal(2.0)(Z, Y) == losses.Focal(gamma=2.0)(Z, Y)
    for wrong in (lambda: losses.Focal(2.0, gamma=1.0), lambda: losses.CrossEntropy(1.0)):
        with pytest.raises(TypeError, match="once, got"):
            wrong()
    with pytest.raises(ValueError, match="gamma must be a number of at least 0"):
        losses.Focal(-1.0)


@pytest.mark.parametrize("loss", SOFT, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("weight", [None, W], ids=["", "weighted"])
def test_one_hot_targets_are_labels(loss, weight):
    loss = type(loss)(*(getattr(loss, name) for name in loss.defaults), weight=weight, reduction="none")
    torch.testing.assert_close(loss(Z, F.one_hot(Y, 4).double()), loss(Z, Y))


@pytest.mark.parametrize("loss", SOFT, ids=lambda loss: type(loss).__name__)
def test_the_loss_is_linear_in_the_targets(loss):
    loss = type(loss)(*(getattr(loss, name) for name in loss.defaults), reduction="none")
    by_class = torch.stack([loss(Z, torch.full((6,), k)) for k in range(4)], dim=1)
    torch.testing.assert_close(loss(Z, T), (T * by_class).sum(dim=1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, W], ids=["", "weighted"])
def test_cross_entropy_is_that_of_torch(weight, reduction):
    ours, theirs = (
        losses.CrossEntropy(weight=weight, reduction=reduction),
        torch.nn.CrossEntropyLoss(weight, reduction=reduction),
    )
    torch.testing.assert_close(ours(Z, T), theirs(Z, T))
    pixels, targets = Z.reshape(3, 2, 4).movedim(2, 1), T.reshape(3, 2, 4).movedim(2, 1)
    torch.testing.assert_close(ours(pixels, targets), theirs(pixels, targets))
    ours, theirs = losses.LabelSmoothing(0.1, weight=weight), torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    torch.testing.assert_close(ours(Z, T), theirs(Z, T))


@pytest.mark.parametrize("loss", SOFT, ids=lambda loss: type(loss).__name__)
def test_gradients_of_soft_targets(loss):
    z = (2 * Z[:3]).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: loss(logits, T[:3]), (z,))


def test_targets_must_be_probabilities_and_batches_need_labels():
    for wrong in (T + 0.1, -T, T * torch.nan):
        with pytest.raises(ValueError, match="must be probabilities that sum to 1"):
            losses.Focal()(Z, wrong)
    with pytest.raises(ValueError, match=r"labels must have shape \(6,\)"):
        losses.MMCE()(Z, T)
    with pytest.raises(ValueError, match=r"labels must have shape \(6,\)"):
        losses.Focal()(Z, torch.nn.functional.one_hot(Y, 4))
