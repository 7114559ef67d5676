"""Pixels: the calibration of each class in each image, summed up image by image.

Images, not pixels, are the independent unit. An image's error is that of its own bins, so that what is too high in one
image and too low in another does not cancel; the mean over the images has Student's interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import softmax

from trueup._core.arrays import as_arrays, to_array
from trueup._core.bins import BINNED_ERRORS, BINS, Bins, cut_points, equal_width, rounding_error
from trueup._core.clusters import t_quantile
from trueup._core.errors import InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, html_table, text_table
from trueup._core.types import ArrayLike
from trueup.convert import classes_last
from trueup.metrics.intervals import Interval
from trueup.metrics.resampling import tail_share

ERRORS = ("ece", "average_ce", "mce")
"""Of the bins of one class in one image: weighted by the pixels of a bin, the mean over the bins, the largest."""


@dataclass(frozen=True, eq=False)
class SegmentationTally:
    """Class-wise calibration errors of each image, mergeable: batch by batch, the set is never held in memory.

    >>> logits = np.log(np.array([[[[0.9, 0.6]], [[0.1, 0.4]]]]))  # one image of two classes, 1 × 2 pixels
    >>> tally = SegmentationTally.of(logits, np.array([[[0, 1]]]), bins=2)
    >>> tally.errors["ece"].round(3)
    array([[0.25, 0.25]])
    """

    errors: Mapping[str, np.ndarray]
    """By the name of the error, (images, classes): NaN where an image has no pixel that counts."""
    pixels: np.ndarray
    """(images,): how many count."""
    correct: np.ndarray
    """(images,): how many of them are right."""
    bins: Bins
    """Of all pixels together, class-wise."""
    background: int | None = None
    """The class that is left out of the means over classes."""

    @classmethod
    def of(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        class_axis: Literal["first", "last"] = "first",
        ignore_index: int = -100,
        background: int | None = None,
        bins: int = BINS,
    ) -> SegmentationTally:
        """Tally images: logits (n, K, …) and labels (n, …), or with `class_axis="last"` logits (n, …, K).

        Pixels labelled `ignore_index` do not count. `background`, a class, is left out of the means over classes.
        """
        z, y = to_array(logits, "logits"), to_array(labels, "labels")
        if z.ndim < 3:
            raise InputError("logits", "have shape (n, K, …), or (n, …, K) with class_axis='last'", str(tuple(z.shape)))
        z = classes_last(z, class_axis)
        if z.shape[:-1] != y.shape:
            wanted = f"have shape {tuple(z.shape[:-1])} to match the logits"
            raise InputError("labels", wanted, str(tuple(y.shape)))
        k = z.shape[-1]
        if background is not None and not 0 <= background < k:
            raise InputError("background", f"be a class, 0..{k - 1}", repr(background))
        found: dict[str, list[np.ndarray]] = {name: [] for name in ERRORS}
        pixels, correct = [], []
        whole = np.zeros((3, k, bins))
        for image, label in zip(z.reshape(len(z), -1, k), y.reshape(len(y), -1), strict=True):
            kept = label != ignore_index
            rows, truth = as_arrays(image[kept], label[kept])
            sums = _class_sums(rows, truth, bins)
            whole += sums
            for name in ERRORS:
                with np.errstate(invalid="ignore", divide="ignore"):
                    found[name].append(BINNED_ERRORS[name](*sums) if len(rows) else np.full(k, math.nan))
            pixels.append(len(rows))
            correct.append(int((rows.argmax(axis=1) == truth).sum()))
        errors = {name: np.stack(each) if each else np.zeros((0, k)) for name, each in found.items()}
        seen, right = np.array(pixels, dtype=np.int64), np.array(correct, dtype=np.int64)
        return cls(errors, seen, right, Bins(equal_width(bins), *whole), background)

    def __add__(self, other: SegmentationTally) -> SegmentationTally:
        if not isinstance(other, SegmentationTally):
            return NotImplemented
        if self.bins.count.shape != other.bins.count.shape or self.background != other.background:
            raise ValueError("tallies must have the same classes, bins and background to be added")
        errors = {name: np.concatenate([self.errors[name], other.errors[name]]) for name in ERRORS}
        pixels = np.concatenate([self.pixels, other.pixels])
        correct = np.concatenate([self.correct, other.correct])
        return SegmentationTally(errors, pixels, correct, self.bins + other.bins, self.background)

    def __radd__(self, other: int) -> SegmentationTally:
        """So that `sum` adds them up."""
        return self if other == 0 else NotImplemented

    @property
    def images(self) -> int:
        """How many images have a pixel that counts."""
        return int((self.pixels > 0).sum())

    @property
    def classes(self) -> tuple[int, ...]:
        """Those that count."""
        return tuple(k for k in range(self.bins.count.shape[0]) if k != self.background)

    def of_images(self, error: str = "ece") -> np.ndarray:
        """The error of each image, the mean over its classes, (images,)."""
        return self._errors(error)[:, list(self.classes)].mean(axis=1)

    def value(self, error: str = "ece", *, level: float = 0.95) -> Interval:
        """The mean over images and classes, with its interval by image."""
        return _interval(self.of_images(error), level)

    def by_class(self, error: str = "ece", *, level: float = 0.95) -> dict[int, Interval]:
        """The mean over the images of each class."""
        return {k: _interval(self._errors(error)[:, k], level) for k in self.classes}

    def accuracy(self, *, level: float = 0.95) -> Interval:
        """The mean over the images of the share of pixels that are right."""
        some = self.pixels > 0
        return _interval(self.correct[some] / self.pixels[some], level)

    def _errors(self, error: str) -> np.ndarray:
        if error not in ERRORS:
            raise InputError("error", f"be one of {', '.join(ERRORS)}", repr(error))
        return self.errors[error][self.pixels > 0]

    def caption(self) -> str:
        """How much was seen."""
        left_out = "" if self.background is None else f", class {self.background} left out"
        return f"{self.images:,} images, {self.pixels.sum():,} pixels{left_out}: intervals by image"

    def table(self, class_names: Sequence[str] | None = None, *, level: float = 0.95) -> list[Row]:
        """Its cells as text, the first row the heads."""
        rows: list[Row] = [["class", "error", "value", f"{format_percent(level)} interval"]]
        for error in ERRORS:
            known = self.by_class(error, level=level)
            named = {str(k) if class_names is None else class_names[k]: found for k, found in known.items()}
            for name, i in {"all": self.value(error, level=level), **named}.items():
                rows.append([name, error, format_number(i.value), format_interval(i.low, i.high)])
        return rows

    def __str__(self) -> str:
        return f"{self.caption()}\n\n{text_table(self.table())}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        return f"<p>{self.caption()}</p>{html_table(head, rows)}"


def _class_sums(logits: np.ndarray, labels: np.ndarray, bins: int) -> np.ndarray:
    """Count, probability and hits of every class in the bins of its probability, (3, classes, bins)."""
    k = logits.shape[1]
    probs = softmax(logits.astype(np.float64), axis=1)
    cuts = cut_points(equal_width(bins), rounding=rounding_error(logits))
    place = np.searchsorted(cuts, probs, side="left") + bins * np.arange(k)
    hits = np.zeros_like(probs)
    hits[np.arange(len(probs)), labels] = 1.0
    sums = [np.bincount(place.ravel(), w, k * bins) for w in (np.ones(probs.size), probs.ravel(), hits.ravel())]
    return np.stack(sums).reshape(3, k, bins)


def _interval(values: np.ndarray, level: float) -> Interval:
    """The mean with Student's interval."""
    n, tail = len(values), tail_share(level)
    if not n:
        return Interval(math.nan, math.nan, math.nan, level)
    mean = float(values.mean())
    if n < 2:
        return Interval(mean, math.nan, math.nan, level)
    reach = t_quantile(tail, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, max(mean - reach, 0.0), min(mean + reach, 1.0), level)
