"""Networks whose outputs have more than two dimensions, from the loader to the saved calibrator."""

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from trueup._core.errors import InputError
from trueup.calibrators import Temperature, choose
from trueup.metrics import SegmentationTally
from trueup.models import evaluate_loader, outputs


class Segmenter(nn.Module):
    """A convolution that sees its labels too sharply: a tiny segmentation network."""

    def __init__(self, classes=3, classes_last=False):
        super().__init__()
        self.convolution = nn.Conv2d(1, classes, 3, padding=1)
        self.classes_last = classes_last
        torch.manual_seed(0)
        nn.init.normal_(self.convolution.weight, std=2.0)

    def forward(self, x):
        z = self.convolution(x)
        return {"out": x, "logits": z.movedim(1, -1) if self.classes_last else z}


def segmentations(model, images=8, size=6, sharpness=2.5, ignored=255):
    """A loader of images with labels drawn from the softened outputs; some pixels are ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(images, 1, size, size, generator=generator)
    with torch.no_grad():
        z = model(x)["logits"]
    z = z if model.classes_last else z.movedim(1, -1)
    y = torch.multinomial(torch.softmax(z / sharpness, -1).reshape(-1, z.shape[-1]), 1, generator=generator)
    y = y.reshape(images, size, size)
    y[:, 0, :2] = ignored
    return [(x[i : i + 3], y[i : i + 3]) for i in range(0, images, 3)]


@pytest.mark.parametrize("classes", ["first", "last"])
def test_a_segmentation_network_from_end_to_end(classes, tmp_path):
    model = Segmenter(classes_last=classes == "last")
    loader = segmentations(model)
    how = {"class_axis": classes, "ignore_index": 255, "progress": False}
    table = trueup.collect(model, loader, **how)
    assert table.logits.shape == (8 * 34, 3)
    assert table.clusters.tolist() == np.repeat(np.arange(8), 34).tolist()

    wrapped = trueup.calibrate(model, loader, **how)
    assert float(wrapped.after.temperature) == pytest.approx(float(Temperature.fit(*table).temperature))
    x = loader[0][0]
    before, after = model(x), wrapped(x)
    assert after["logits"].shape == before["logits"].shape
    assert torch.allclose(after["logits"], before["logits"] / wrapped.after.temperature)
    assert after["out"] is before["out"] or torch.equal(after["out"], before["out"])

    calibrated = trueup.collect(wrapped, loader, **how)
    scores = trueup.compare({"raw": tuple(table), "after": tuple(calibrated)}, clusters=table.options()["clusters"])
    assert scores.clusters == 8
    assert scores.changes["after"]["nll"].high < 0
    assert "8 clusters (sample): intervals by sample" in scores.caption()

    tally = sum(
        SegmentationTally.of(*batch, class_axis=classes, ignore_index=255)
        for batch in outputs(model, loader, class_axis=classes, progress=False)
    )
    better = sum(
        SegmentationTally.of(*batch, class_axis=classes, ignore_index=255)
        for batch in outputs(wrapped, loader, class_axis=classes, progress=False)
    )
    assert (tally.images, int(tally.pixels.sum())) == (8, 272)
    assert better.value().value < tally.value().value

    trueup.save(wrapped.after, tmp_path / "t.safetensors")
    again = trueup.models.Calibrated(model, after=trueup.load(tmp_path / "t.safetensors"), class_axis=classes)
    assert torch.equal(again(x)["logits"], after["logits"])


def test_the_table_needs_no_logits_in_memory():
    model = Segmenter()
    loader = segmentations(model)
    table = trueup.collect(model, loader, class_axis="first", ignore_index=255, progress=False)
    whole = trueup.evaluate(*table, **table.options())
    streamed = evaluate_loader(model, iter(loader), class_axis="first", ignore_index=255, progress=False)
    assert streamed.clusters == 8
    for name in ("accuracy", "nll", "ece", "sce"):
        assert streamed[name].value == pytest.approx(whole[name].value)
    assert streamed["nll"].low == pytest.approx(whole["nll"].low)
    assert np.isnan(streamed["aece"].low)
    x, y = torch.randn(9, 4), torch.arange(9) % 4
    plain = evaluate_loader(nn.Identity(), [(x[:5], y[:5]), (x[5:], y[5:])], progress=False)
    assert plain["nll"].value == pytest.approx(trueup.metrics.nll(x, y))
    assert plain.clusters is None
    with pytest.raises(ValueError, match="batch 1: labels must lie in 0..2, got"):
        evaluate_loader(
            model,
            [(a, b * (k == 0) + 9 * (k == 1)) for k, (a, b) in enumerate(loader)],
            class_axis="first",
            ignore_index=255,
        )
    with pytest.raises(ValueError, match="at least one batch"):
        evaluate_loader(model, [], class_axis="first")


def test_methods_that_choose_keep_images_together():
    model = Segmenter()
    seen = []

    def spy(logits, labels, **options):
        seen.append(len(labels))
        return Temperature.fit(logits, labels)

    fit = choose({"identity": trueup.METHODS["identity"], "spy": spy}, n_folds=4)
    wrapped = trueup.calibrate(model, segmentations(model), fit, class_axis="first", ignore_index=255, progress=False)
    assert wrapped.after.choice.chosen == "spy"
    assert all(n % 34 == 0 for n in seen)  # whole images, of 34 pixels each


def test_outputs_must_say_where_their_classes_are():
    model = Segmenter()
    loader = segmentations(model)
    with pytest.raises(ValueError, match=r'batch 0: labels must have shape \(n,\).*class_axis="first" or "last"'):
        trueup.collect(model, loader, progress=False)
    with pytest.raises(ValueError, match='class_axis must be "first"'):
        trueup.models.Calibrated(model, after=Temperature(2.0))(loader[0][0])
    with pytest.raises(InputError, match='class_axis must be "first"'):
        trueup.models.Calibrated(model, after=Temperature(2.0), class_axis="middle")
    with pytest.raises(ValueError, match="batch 0: labels must have shape"):
        trueup.collect(model, loader, class_axis="last", progress=False)
    with pytest.raises(ValueError, match="batch 0: labels must lie in 0..2, got 0..255"):
        trueup.collect(model, loader, class_axis="first", progress=False)


def test_flat_outputs_stay_a_pair():
    x, y = torch.randn(6, 4), torch.arange(6) % 4
    assert isinstance(trueup.collect(nn.Identity(), [(x, y)], progress=False), trueup.Predictions)
    table = trueup.collect(nn.Identity(), [(x, y)], class_axis="last", progress=False)
    assert table.clusters.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(trueup.models.Calibrated(nn.Identity(), after=Temperature(2.0), class_axis="first")(x), x / 2)


def test_torch_export_keeps_the_shape():
    wrapped = trueup.models.Calibrated(nn.Conv2d(1, 3, 1), after=Temperature(2.0), class_axis="first").eval()
    x = torch.randn(2, 1, 4, 4)
    exported = torch.export.export(wrapped, (x,)).module()
    assert torch.allclose(exported(x), wrapped(x))


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3, 2, 3)])
def test_streaming_metrics_take_tokens_and_pixels(shape):
    torchmetrics = pytest.importorskip("trueup.integrations.torchmetrics")
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(*shape, 5)))
    y = torch.from_numpy(rng.integers(0, 5, shape))
    y[0, 0] = -1
    flat = trueup.convert.flatten(z, y, class_axis="last", ignore_index=-1)
    for kind in (torchmetrics.ECE, torchmetrics.NLL, torchmetrics.Brier):
        last, first = (kind(class_axis=axis, ignore_index=-1) for axis in ("last", "first"))
        plain = kind()
        plain.update(*flat)
        last.update(z, y)
        first.update(z.movedim(-1, 1), y)
        assert float(last.compute()) == pytest.approx(float(plain.compute()))
        assert float(first.compute()) == pytest.approx(float(plain.compute()))
    table = torchmetrics.CalibrationTable(5, class_axis="last", ignore_index=-1)
    table.update(z, y, sample_weight=torch.tensor([1.0, 0.0]))
    alone = torchmetrics.CalibrationTable(5, class_axis="last", ignore_index=-1)
    alone.update(z[:1], y[:1])
    assert float(table.compute()["nll"]) == pytest.approx(float(alone.compute()["nll"]))
    with pytest.raises(InputError, match="class_axis must be"):
        torchmetrics.ECE(class_axis=1)
