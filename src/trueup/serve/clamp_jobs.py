"""Neural Clamping on the server: of the demo's digits network, or of the network that the server was started with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Literal

from trueup._core.errors import record_warnings
from trueup.io.predictions import Predictions
from trueup.serve import diagrams, models
from trueup.serve.jobs import Job
from trueup.serve.settings import ServedNetwork

if TYPE_CHECKING:
    from torch import Tensor, nn

DIGITS = "digits"
SEVERITY = 4
"""Severity of the change of the camera."""
SIDE = 32
"""Largest number of pixels per side of a picture on the page."""
UNCALIBRATED, TEMPERATURE, CLAMPED = "Uncalibrated", "Temperature scaling", "Neural Clamping"


@dataclass(eq=False)
class ClampJob(Job):
    """A fit of δ and T, scored on test inputs."""

    network: ServedNetwork | None
    """The network to clamp; None is that of the digits."""
    recipe: Literal["subspace", "paper", "code"]
    camera: str | None
    """Corruption of all images; None leaves them as they are."""
    progress: str = "starting"

    def compute(self) -> models.ClampResult:
        """Fit the clamped network, and compare it with the uncalibrated one and with temperature scaling."""
        from trueup.calibrators.temperature import Temperature
        from trueup.clamping import RECIPES, clamp
        from trueup.metrics.table import DEFAULT, compare
        from trueup.models.calibrated import collect

        chosen = RECIPES[self.recipe]

        @wraps(chosen)
        def recipe(problem: Any) -> Any:
            return chosen(replace(problem, progress=self._report))

        network, val, test = self._load()
        self._report("fitting δ and T")
        with record_warnings() as warnings:
            clamped = clamp(network, val, recipe=recipe, progress=False)
            temperature = Temperature.fit(*collect(network, val, progress=False))
        self._report("scoring")
        plain = collect(network, test, progress=False)
        pairs = {
            UNCALIBRATED: plain,
            TEMPERATURE: Predictions(temperature(plain.logits), plain.labels),
            CLAMPED: collect(clamped, test, progress=False),
        }
        scores = compare(pairs, metrics=DEFAULT, n_resamples=diagrams.RESAMPLES).to_dict()
        record, (first, _) = clamped.fit_record, next(iter(test))
        delta = clamped.get_buffer("before.delta").reshape(first[0].shape)
        return models.ClampResult(
            temperature=record.temperature,
            delta_norm=record.delta_norm,
            verdict=record.verdict,
            warnings=list(warnings),
            delta=picture(delta),
            image=picture(first[0]),
            before=diagrams.curve(pairs[UNCALIBRATED], method=UNCALIBRATED),
            after=diagrams.curve(pairs[CLAMPED], method=CLAMPED),
            scores=scores,
        )

    def _report(self, line: str) -> None:
        self.check()
        self.progress = line

    def _load(self) -> tuple[nn.Module, Iterable[Any], Iterable[Any]]:
        """Return the network, and its calibration and test batches with the changed camera."""
        if self.network is not None:
            self._report(f"loading {self.network.name}")
            network, (val, test) = self.network.load()
        else:
            self._report("training a network on 200 digits")
            network, (val, test) = digits_network()
        return network, self._shifted(val), self._shifted(test)

    def _shifted(self, batches: Iterable[Any]) -> Iterable[Any]:
        if self.camera is None:
            return batches
        from trueup.models.corruptions import corrupt

        return [(corrupt(images, self.camera, SEVERITY), labels) for images, labels in batches]


@cache
def digits_network() -> tuple[nn.Module, tuple[Iterable[Any], Iterable[Any]]]:
    """Train the demo's network; return it with its calibration and test batches."""
    from trueup.demo.digits import digits, loader, train_network
    from trueup.models.image_data import library

    library("sklearn.datasets", "scikit-learn")
    data = digits()
    return train_network(data.train, progress=False), (loader(data.val), loader(data.test))


def picture(values: Tensor) -> list[list[float]] | None:
    """Average an image (channels, height, width) over its channels and, if it is large, over blocks of pixels.

    Inputs that are no images have no picture.
    """
    if values.ndim != 3:
        return None
    from torch.nn.functional import adaptive_avg_pool2d

    height, width = (min(SIDE, side) for side in values.shape[1:])
    rows: list[list[float]] = adaptive_avg_pool2d(values.float().mean(dim=0)[None], (height, width))[0].tolist()
    return rows
