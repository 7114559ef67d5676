"""Families of input maps: the identity at zero, gradients, compositions, words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueup._core.errors import InputError
from trueup.adaptation import FAMILIES
from trueup.adaptation.composition import Composition, PixelSpace
from trueup.adaptation.input_maps import CONTAINS, InputMap, Orientation, orientations
from trueup.adaptation.natural_gradient import pull_back, solve_damped

SHAPE = (3, 8, 8)
LARGE = (3, 16, 16)
FEATURES = (20,)
ZERO_ONE = (torch.tensor(0.0), torch.tensor(1.0))


def shape_of(name: str) -> tuple[int, ...]:
    return next(shape for shape in (SHAPE, LARGE, FEATURES) if FAMILIES[name].suits(shape))


def drawn(name: str, shape: tuple[int, ...] | None = None, seed: int = 0) -> InputMap:
    family, shape = FAMILIES[name], shape_of(name) if shape is None else shape
    return family(shape, 0.3 * torch.randn(family.size(shape), generator=torch.Generator().manual_seed(seed)))


def pixels(n: int = 5, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_the_identity_at_zero_and_says_nothing(name: str) -> None:
    family, x = FAMILIES[name](shape_of(name)), pixels(5, shape_of(name))
    torch.testing.assert_close(family(x), x, rtol=0, atol=1e-6)
    assert family.words() == []


@pytest.mark.parametrize("name", FAMILIES)
def test_away_from_zero_it_changes_pixels_and_says_so(name: str) -> None:
    family, x = drawn(name), pixels(5, shape_of(name))
    assert float((family(x) - x).abs().max()) > 0.01
    assert family.words()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_each_sample_are_those_of_autograd(name: str) -> None:
    space = PixelSpace(drawn(name), torch.tensor(-1.0), torch.tensor(2.0))
    x = pixels(3, shape_of(name))
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    rows = pull_back(space, space.inner.theta, x, g)
    for i in range(3):  # one sample at a time, by plain autograd
        theta = space.inner.theta.clone().requires_grad_()
        (slow,) = torch.autograd.grad((space.apply_map(theta, x[i : i + 1]) * g[i]).sum(), theta)
        torch.testing.assert_close(rows[i], slow, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rich", "poor"), [(rich, poor) for rich in CONTAINS for poor in CONTAINS[rich]])
def test_a_richer_family_starts_where_the_poorer_one_was(rich: str, poor: str) -> None:
    shape = shape_of(rich)
    start, x = Composition([drawn(poor, shape)]), pixels(5, shape)
    extended = start.extend(rich, shape)
    assert [part.name for part in extended.parts] == [rich]
    torch.testing.assert_close(extended(x), start(x), rtol=0, atol=1e-5)


def test_a_kernel_takes_over_colours_and_sharpness_together() -> None:
    start = Composition([drawn("colour"), drawn("grey_kernel", seed=3)])
    torch.testing.assert_close(start.extend("kernel", SHAPE)(pixels()), start(pixels()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("between", ["radial_gain", "grey_kernel"])
def test_an_offset_is_not_moved_past_another_map(between: str) -> None:
    start = Composition([drawn("offset"), drawn(between, seed=3)])
    torch.testing.assert_close(start.extend("smooth_offset", SHAPE)(pixels()), start(pixels()), rtol=0, atol=1e-5)


def test_a_composition_applies_gamma_first() -> None:
    both = Composition([drawn("affine"), drawn("gamma")])
    assert both.name == "gamma + affine"
    torch.testing.assert_close(both(pixels()), drawn("affine")(drawn("gamma")(pixels())))
    torch.testing.assert_close(both.apply_map(both.theta, pixels()), both(pixels()))


def test_pixel_space_is_the_map_between_two_affine_changes() -> None:
    mean, std = torch.tensor([0.4, 0.5, 0.6]).reshape(3, 1, 1), torch.tensor([0.2, 0.3, 0.25]).reshape(3, 1, 1)
    space = PixelSpace(drawn("gamma"), -mean / std, (1 - mean) / std)
    expected = (drawn("gamma")(pixels()) - mean) / std
    torch.testing.assert_close(space((pixels() - mean) / std), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["offset", "affine", "colour", "pixel_offset"])
def test_features_and_embeddings_are_mapped_too(name: str) -> None:
    family = drawn(name, (4,))
    rows = pixels(6, (4,))
    tokens = rows.reshape(2, 3, 4)
    torch.testing.assert_close(family(tokens).reshape(6, 4), family(rows))


def test_many_coordinates_are_solved_among_the_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(20, 450, generator=generator, dtype=torch.float64).numpy()
    v = torch.randn(450, generator=generator, dtype=torch.float64).numpy()
    precision = torch.full((450,), 0.01, dtype=torch.float64).numpy()
    scaled = u / len(u) ** 0.5
    damping = 0.05 * (scaled**2).sum() / 450
    matrix = torch.from_numpy(scaled.T @ scaled) + torch.eye(450, dtype=torch.float64) * (0.01 + damping)
    slow = torch.linalg.solve(matrix, torch.from_numpy(v))
    torch.testing.assert_close(torch.from_numpy(solve_damped(u, v, precision)), slow)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="theta must have shape"):
        FAMILIES["affine"](SHAPE, torch.zeros(5))
    with pytest.raises(InputError, match="shape must"):
        FAMILIES["kernel"]((4,))


def test_shrinkage_takes_noise_away_and_leaves_edges() -> None:
    edge = torch.where(torch.arange(16)[None, :] < 8, 0.2, 0.8).expand(1, 3, 16, 16)
    noisy = edge + 0.02 * torch.randn(edge.shape, generator=torch.Generator().manual_seed(0))
    # Small detail goes, large stays: a = 0, and −1 in all for what is below the larger threshold.
    theta = torch.tensor([0.0, 0.0, -2.0, 0.0, 0.0, -2.0])
    mapped = FAMILIES["shrinkage"]((3, 16, 16), theta)(noisy)
    flat = (slice(None), slice(None), slice(None), slice(0, 5))
    assert float((mapped - edge)[flat].std()) < 0.6 * float((noisy - edge)[flat].std())
    step = float((mapped[..., 8] - mapped[..., 7]).mean())
    assert step > 0.8 * 0.6  # a smoothing that takes as much noise away leaves half of it


def test_detail_that_goes_at_any_size_is_no_noise() -> None:
    family, shape = FAMILIES["shrinkage"], (3, 16, 16)
    smaller, all_sizes, larger = [0.0, -1.0, 0, 0, 0, 0], [-1.0, 0.2, 0, 0, 0, 0], [-2.0, 2.2, 0, 0, 0, 0]
    for theta, cause in ((smaller, "noise"), (all_sizes, "sharpness"), (larger, "noise")):
        assert family(shape, torch.tensor(theta)).diagnosis() == cause


def test_images_without_colours_have_no_white_balance() -> None:
    grey, coloured = (FAMILIES["affine"](shape) for shape in ((1, 8, 8), (3, 8, 8)))
    assert (grey.diagnosis(), coloured.diagnosis()) == ("brightness and contrast", "white balance")
    assert FAMILIES["affine"]((5,)).diagnosis() == "gain and offset per feature"


def test_inputs_of_one_position_have_no_maps_of_positions() -> None:
    assert {name for name in FAMILIES if FAMILIES[name].suits((64, 1, 1))} == {"offset", "affine", "pixel_offset"}
    assert FAMILIES["affine"]((64, 1, 1)).diagnosis() == "gain and offset per channel"
    assert FAMILIES["row_offset"].suits((64, 2, 1))


def test_every_orientation_is_the_exact_inverse_of_one_of_them() -> None:
    x = pixels(2, LARGE)
    exact = [orientation for orientation in orientations(LARGE) if orientation.is_exact]
    assert len(exact) == 13
    for orientation in exact:
        there = orientation(x)
        assert float((there - x).abs().max()) > 0.1
        assert min(float((other(there) - x).abs().max()) for other in exact) < 1e-5
        assert orientation.words()


def test_an_orientation_says_what_it_does() -> None:
    phrases = {phrase for orientation in orientations(LARGE) for phrase in orientation.words()}
    assert {"flip upside down", "inverted brightness", "channels in the order blue, green, red"} <= phrases
    assert {"rotation by 20°", "zoom 1.43", "shift by 20 % of the side"} <= phrases
    causes = {orientation.diagnosis() for orientation in orientations(LARGE)}
    assert causes == {"another orientation", "another order of channels", "inverted brightness"}
    assert len(orientations((1, 16, 24))) == 3 + 6 + 4 + 4 + 1
    torch.testing.assert_close(Orientation(LARGE)(pixels(2, LARGE)), pixels(2, LARGE), rtol=0, atol=1e-6)


def test_a_rotation_of_an_image_that_is_no_square_keeps_its_angles() -> None:
    wide = torch.zeros(1, 1, 24, 48)
    wide[:, :, 11:13, 8:40] = 1  # a bar of 2 by 32 pixels
    turned = next(
        o for o in orientations((1, 24, 48)) if o.words() == ["rotation by 20°", "zoom 1.00"] or "20°" in str(o.words())
    )
    rows, columns = turned(wide)[0, 0].gt(0.5).nonzero().T.double()
    slope = float(((rows - rows.mean()) * (columns - columns.mean())).sum() / ((columns - columns.mean()) ** 2).sum())
    assert abs(slope) == pytest.approx(0.364, abs=0.05)  # tan 20°
