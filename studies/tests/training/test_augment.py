import torch

from trueup_studies.training.augment import flip_and_crop


def test_each_image_is_itself_mirrored_or_not_and_shifted():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 2, 6, 5, generator=generator) + 1
    out = flip_and_crop(images, generator, padding=2)
    assert out.shape == images.shape
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for given, got in zip(padded, out, strict=True):
        places = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if got.equal(
                given[:, top : top + 6, left : left + 5].flip(2)
                if mirrored
                else given[:, top : top + 6, left : left + 5]
            )
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == {0, 1, 2, 3, 4}
    assert {mirrored for *_, mirrored in seen} == {False, True}


def test_draws_from_its_generator_alone():
    x, before = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.random.get_rng_state()
    one, two = (flip_and_crop(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.equal(two)
    assert not one.equal(flip_and_crop(x, torch.Generator().manual_seed(4)))
    assert torch.random.get_rng_state().equal(before)
    still = flip_and_crop(x, torch.Generator().manual_seed(0), padding=0)
    assert all(a.equal(b) or a.equal(b.flip(2)) for a, b in zip(still, x, strict=True))
