import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

import reference
from trueup.models import CORRUPTIONS, corrupt, corruptions
from trueup.models.corruptions import CAST, corruptions_for

names = pytest.mark.parametrize("name", CORRUPTIONS)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth(n=4, side=32):
    """Images with the slow changes of photographs, whole bytes."""
    coarse = drawn(n, 3, 5, 5)
    images = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear", align_corners=True)
    return torch.round(images * 255) / 255


@names
@pytest.mark.parametrize("severity", range(1, 6))
def test_keeps_range_shape_and_input(name, severity):
    x = drawn(3, 3, 13, 10)
    before = x.clone()
    out = corrupt(x, name, severity)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert 0 <= out.min() <= out.max() <= 1
    assert x.equal(before)
    assert not out.equal(x)
    assert CORRUPTIONS[name](x, severity).equal(out)


@names
def test_severity_zero_is_the_identity(name):
    x = drawn(2, 3, 8, 8)
    out = corrupt(x, name, 0)
    assert out.equal(x)
    assert out.data_ptr() != x.data_ptr()


@names
def test_severity_grows(name):
    x = smooth()
    away = [(corrupt(x, name, s) - x).square().mean().item() for s in range(6)]
    assert away == sorted(away)
    assert len(set(away)) == 6


@names
def test_one_image_is_a_batch_of_one(name):
    x = drawn(1, 3, 9, 12)
    assert corrupt(x[0], name, 3).equal(corrupt(x, name, 3)[0])


@names
def test_images_are_treated_one_by_one(name):
    x = drawn(5, 3, 16, 16)
    whole = corrupt(x, name, 4, seed=2)
    parts = torch.cat([corrupt(x[:2], name, 4, seed=2), corrupt(x[2:], name, 4, seed=2, first=2)])
    torch.testing.assert_close(parts, whole)


@names
def test_precision(name):
    x = smooth()
    exact = corrupt(x.double(), name, 3)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(corrupt(x, name, 3).double(), exact, atol=1e-6, rtol=0)
    half = corrupt(x.half(), name, 3)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), corrupt(x.half().float(), name, 3), atol=1e-3, rtol=0)


@names
@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 3, 1, 1), (2, 3, 2, 1), (1, 3, 40, 3)])
def test_odd_shapes(name, shape):
    out = corrupt(drawn(*shape), name, 5)
    assert out.shape == shape
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels(channels):
    x = drawn(2, channels, 8, 8)
    defined = corruptions_for(channels)
    assert set(CORRUPTIONS) - set(defined) == {1: {"colour_cast"}, 3: set()}.get(channels, {"colour_cast", "jpeg"})
    for name in CORRUPTIONS:
        if name in defined:
            assert corrupt(x, name, 2).shape == x.shape
        else:
            with pytest.raises(ValueError, match=f"channel.*{channels}"):
                corrupt(x, name, 2)


@names
def test_random_state_is_untouched(name):
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    corrupt(drawn(2, 3, 8, 8), name, 3)
    assert torch_state.equal(torch.random.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("name", ["gaussian_noise", "haze"])
def test_seeds(name):
    x = torch.full((2, 3, 16, 16), 0.5)
    one, again, other = (corrupt(x, name, 5, seed=seed) for seed in (1, 1, 2))
    assert one.equal(again)
    assert not torch.allclose(one, other, atol=1e-3)
    assert not torch.allclose(one[0], one[1], atol=1e-3)
    assert CORRUPTIONS[name].random


@given(st.floats(0, 1), st.floats(-1, 1), st.floats(0, 3))
def test_formulas_of_one_pixel(pixel, amount, factor):
    x = torch.full((3, 1, 1), pixel, dtype=torch.float64)
    clip = lambda v: min(max(v, 0.0), 1.0)  # noqa: E731
    assert corruptions.brightness(x, amount)[1].item() == pytest.approx(clip(pixel + amount), abs=1e-12)
    assert corruptions.contrast(x, factor)[2].item() == pytest.approx(clip((pixel - 0.5) * factor + 0.5), abs=1e-12)
    cast = corruptions.colour_cast(x, (amount, 0, -amount)).flatten().tolist()
    assert cast == pytest.approx([clip(pixel + amount), pixel, clip(pixel - amount)], abs=1e-12)


def test_settings():
    """The amounts at the middle severity, on paper, and the colours of the cast."""
    x = torch.tensor([0.4, 0.5, 0.6]).reshape(3, 1, 1)
    for name, expected in {
        "brightness": (0.7, 0.8, 0.9),
        "darkness": (0.1, 0.2, 0.3),
        "colour_cast": (0.6, 0.4, 0.45),
        "contrast": (0.45, 0.5, 0.55),
    }.items():
        torch.testing.assert_close(corrupt(x, name, 3).flatten(), torch.tensor(expected))
    torch.testing.assert_close(corrupt(x, "colour_cast", 5).flatten(), torch.tensor([0.7, 0.35, 0.375]))
    assert CORRUPTIONS["colour_cast"].settings[2] == CAST
    assert all(len(c.settings) == 5 for c in CORRUPTIONS.values())


def test_noise_is_normal_of_the_right_size():
    x = torch.full((100, 3, 32, 32), 0.5)
    noise = corruptions.gaussian_noise(x, 0.06) - x
    assert noise.std().item() == pytest.approx(0.06, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=5e-4)
    assert (noise.abs() < 0.06).float().mean().item() == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.005)
    across = torch.corrcoef(noise[:20].flatten(1))
    assert (across - torch.eye(20)).abs().max() < 0.1


@pytest.mark.parametrize("sigma", CORRUPTIONS["gaussian_blur"].settings)
def test_blur_is_scipys(sigma):
    x = drawn(2, 3, 20, 11, dtype=torch.float64)
    expected = gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
    np.testing.assert_allclose(corruptions.gaussian_blur(x, sigma), expected, atol=1e-12)


@given(st.floats(0.2, 1.5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_blur_is_the_slow_one(sigma, height, width, seed):
    x = drawn(1, height, width, seed=seed, dtype=torch.float64)
    np.testing.assert_allclose(
        corruptions.gaussian_blur(x, sigma)[0], reference.blurred(x[0].numpy(), sigma), atol=1e-12
    )


def test_blur_by_nothing():
    x = drawn(1, 4, 4)
    assert corruptions.gaussian_blur(x, 0).equal(x)


def test_pixelate_makes_flat_tiles_of_their_mean():
    x = drawn(2, 3, 32, 32)
    out = corruptions.pixelate(x, 0.5)
    tiles = out.reshape(2, 3, 16, 2, 16, 2)
    torch.testing.assert_close(tiles, x.reshape(tiles.shape).mean((3, 5), keepdim=True).expand(tiles.shape))
    assert corruptions.pixelate(x, 1).equal(x)
    assert [len(corrupt(x, "pixelate", s)[0, 0, 0].unique()) for s in range(1, 6)] == [29, 26, 22, 19, 16]
    torch.testing.assert_close(corruptions.pixelate(x, 0), x.mean((2, 3), keepdim=True).expand(x.shape))


def test_pixelate_averages_by_area():
    x = torch.tensor([[[0.1, 0.4, 0.9]]])
    first, last = (0.1 + 0.2) / 1.5, (0.2 + 0.9) / 1.5
    torch.testing.assert_close(corruptions.pixelate(x, 0.6), torch.tensor([[[first, last, last]]]))
    torch.testing.assert_close(corruptions.pixelate(x.mT, 0.6), torch.tensor([[[first], [last], [last]]]))


def test_haze_is_grey_bright_and_slow():
    field = corruptions.haze(torch.zeros(50, 3, 32, 32), 1.0)
    assert field[:, 0].equal(field[:, 2])
    assert field.min() >= 0.5
    assert field.mean().item() == pytest.approx(0.75, abs=0.02)
    assert field.diff(dim=2).abs().max() < 0.1
    assert field.std(dim=(2, 3)).min() > 0.03
    x = drawn(50, 3, 32, 32)
    torch.testing.assert_close(corruptions.haze(x, 0.3), 0.7 * x + 0.3 * field)
    assert corruptions.haze(x, 0).equal(x)


@given(st.integers(1, 100), st.integers(0, 99), st.floats(0.05, 1))
def test_grey_jpeg_is_the_slow_one(quality, seed, spread):
    x = torch.round(255 * (0.5 + spread * (drawn(1, 8, 16, seed=seed, dtype=torch.float64) - 0.5))) / 255
    out = corruptions.jpeg(x, quality)[0] * 255
    blocks = [reference.cosine_quantised(255 * b.numpy(), corruptions._LUMA, quality) for b in x[0].split(8, dim=1)]
    np.testing.assert_allclose(out, np.concatenate(blocks, axis=1), atol=1e-6)


@pytest.mark.parametrize("quality", [20, 50, 95])
def test_colour_jpeg_by_steps(quality):
    """Tiles of 2 × 2 equal pixels, so that halving the chroma loses nothing, through the published equations."""
    x = torch.round(drawn(3, 8, 8, seed=5, dtype=torch.float64).repeat_interleave(2, 1).repeat_interleave(2, 2) * 255)
    r, g, b = x.numpy()
    whole = lambda v: np.floor(v + 0.5 + 1e-9)  # noqa: E731
    luma = whole(0.299 * r + 0.587 * g + 0.114 * b)
    blue = whole(-0.168735892 * r - 0.331264108 * g + 0.5 * b + 128)[::2, ::2]
    red = whole(0.5 * r - 0.418687589 * g - 0.081312411 * b + 128)[::2, ::2]
    for i, j in np.ndindex(2, 2):
        at = slice(8 * i, 8 * i + 8), slice(8 * j, 8 * j + 8)
        luma[at] = reference.cosine_quantised(luma[at], corruptions._LUMA, quality)
    blue, red = (reference.cosine_quantised(c, corruptions._CHROMA, quality) for c in (blue, red))

    def doubled(c):
        for axis in (0, 1):
            edge = np.concatenate([c.take([0], axis), c, c.take([-1], axis)], axis)
            n = c.shape[axis]
            left, right = (0.75 * c + 0.25 * edge.take(range(k, n + k), axis) for k in (0, 2))
            c = np.stack([left, right], axis + 1).reshape([s * (1 + (a == axis)) for a, s in enumerate(c.shape)])
        return np.round(c) - 128

    blue, red = doubled(blue), doubled(red)
    expected = np.stack([luma + 1.402 * red, luma - 0.344136286 * blue - 0.714136286 * red, luma + 1.772 * blue])
    out = corruptions.jpeg(x / 255, quality).numpy() * 255
    np.testing.assert_allclose(out, whole(expected).clip(0, 255), atol=1e-6)


def test_jpeg_laws():
    flat = torch.full((3, 24, 20), 128 / 255)
    assert corruptions.jpeg(flat, 20).equal(flat)
    x = smooth()
    assert (corruptions.jpeg(x[:, :1], 100) - x[:, :1]).abs().max() <= 1.01 / 255
    out = corruptions.jpeg(drawn(2, 3, 9, 9), 90) * 255
    torch.testing.assert_close(out, out.round(), atol=1e-4, rtol=0)
    assert corruptions._LUMA[5][:4] == (24, 35, 55, 64)
    assert (sum(map(sum, corruptions._LUMA)), sum(map(sum, corruptions._CHROMA))) == (3688, 5505)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((3, 4, 4)), "images must be a torch tensor (n, C, H, W) or (C, H, W), got ndarray"),
        (torch.zeros(4, 4), "images must have shape (n, C, H, W) or (C, H, W), got (4, 4)"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), "got torch.uint8; bytes are divided by 255"),
        (torch.full((3, 4, 4), 1.5), "images must lie in [0, 1], before normalisation, got 1.5..1.5"),
        (torch.full((3, 4, 4), -0.1), "images must lie in [0, 1], before normalisation, got -0.1..-0.1"),
        (torch.full((3, 4, 4), math.nan), "images must lie in [0, 1], before normalisation, got nan..nan"),
    ],
)
@pytest.mark.parametrize("severity", [0, 1])
def test_images_refused(images, message, severity):
    with pytest.raises(ValueError, match=re.escape(message)):
        corrupt(images, "contrast", severity)


@pytest.mark.parametrize("severity", [-1, 6, 2.5, True, "3", None])
def test_severity_refused(severity):
    with pytest.raises(ValueError, match=re.escape(f"severity must be a whole number in 0..5, got {severity!r}")):
        corrupt(torch.zeros(3, 4, 4), "jpeg", severity)


def test_name_refused():
    with pytest.raises(ValueError, match="name must be one of brightness, .*, haze, got 'snow'"):
        corrupt(torch.zeros(3, 4, 4), "snow", 1)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("brightness", (math.nan,), "amount must be a finite number in [-1, 1], got nan"),
        ("colour_cast", ((0.1, 2, 0),), "vector must be a finite number in [-1, 1], got 2"),
        ("colour_cast", ((0.1,),), "vector must have one entry per channel, 3 in all, got 1"),
        ("contrast", (-1,), "factor must be a finite number in [0, inf], got -1"),
        ("gaussian_noise", (math.inf,), "sigma must be a finite number in [0, inf], got inf"),
        ("gaussian_blur", (-0.1,), "sigma must be a finite number in [0, inf], got -0.1"),
        ("pixelate", (1.1,), "share must be a finite number in [0, 1], got 1.1"),
        ("jpeg", (0,), "quality must be a finite number in [1, 100], got 0"),
        ("haze", (2,), "density must be a finite number in [0, 1], got 2"),
    ],
)
def test_amounts_refused(function, args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(corruptions, function)(torch.zeros(3, 4, 4), *args)


@pytest.mark.parametrize("option", ["seed", "first"])
def test_negative_seeds_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be a finite number"):
        corrupt(torch.zeros(3, 4, 4), "haze", 1, **{option: -1})
