"""Segmentation: the calibration of each class in each image, averaged over images.

Images are the independent unit, not pixels. An image's error uses its own bins, so errors of different images do not
cancel. The mean over the images has Student's interval.
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
"""Errors of the bins of one class in one image: weighted by pixels, averaged over the bins, and the largest."""


@dataclass(frozen=True, eq=False)
class SegmentationTally:
    """Class-wise calibration errors of each image; mergeable, so the data set is never held in memory.

    >>> logits = np.log(np.array([[[[0.9, 0.6]], [[0.1, 0.4]]]]))  # one image of two classes, 1 × 2 pixels
    >>> tally = SegmentationTally.of(logits, np.array([[[0, 1]]]), bins=2)
    >>> tally.errors["ece"].round(3)
    array([[0.25, 0.25]])
    """

    errors: Mapping[str, np.ndarray]
    """By name of the error, (images, classes); NaN where no pixel of the image counts."""
    pixels: np.ndarray
    """(images,): number of pixels that count."""
    correct: np.ndarray
    """(images,): number of those that are right."""
    bins: Bins
    """Class-wise bins of all pixels."""
    background: int | None = None
    """Class that is left out of the means over classes."""

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
        """Tally a batch of images.

        Parameters
        ----------
        logits
            Logits, shape (n, classes, …), or (n, …, classes) with `class_axis="last"`.
        labels
            Class numbers, shape (n, …).
        class_axis
            Position of the classes, "first" (after the batch) or "last".
        ignore_index
            Label of pixels that do not count.
        background
            Class that is left out of the means over classes.
        bins
            Number of bins.

        Returns
        -------
        SegmentationTally
            The tally; add tallies of batches with ``+``.
        """
        z, y = to_array(logits, "logits"), to_array(labels, "labels")
        if z.ndim < 3:
            raise InputError("logits", "have shape (n, K, …), or (n, …, K) with class_axis='last'", str(tuple(z.shape)))
        z = classes_last(z, class_axis)
        if z.shape[:-1] != y.shape:
            expected = f"have shape {tuple(z.shape[:-1])} to match the logits"
            raise InputError("labels", expected, str(tuple(y.shape)))
        k = z.shape[-1]
        if background is not None and not 0 <= background < k:
            raise InputError("background", f"be a class, 0..{k - 1}", repr(background))
        of_image: dict[str, list[np.ndarray]] = {name: [] for name in ERRORS}
        pixels, correct = [], []
        total = np.zeros((3, k, bins))
        for image, label in zip(z.reshape(len(z), -1, k), y.reshape(len(y), -1), strict=True):
            kept = label != ignore_index
            rows, truth = as_arrays(image[kept], label[kept])
            sums = _class_sums(rows, truth, bins)
            total += sums
            for name in ERRORS:
                with np.errstate(invalid="ignore", divide="ignore"):
                    of_image[name].append(BINNED_ERRORS[name](*sums) if len(rows) else np.full(k, math.nan))
            pixels.append(len(rows))
            correct.append(int((rows.argmax(axis=1) == truth).sum()))
        errors = {name: np.stack(each) if each else np.zeros((0, k)) for name, each in of_image.items()}
        counted, right = np.array(pixels, dtype=np.int64), np.array(correct, dtype=np.int64)
        return cls(errors, counted, right, Bins(equal_width(bins), *total), background)

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
        """Support `sum`."""
        return self if other == 0 else NotImplemented

    @property
    def images(self) -> int:
        """Number of images with a pixel that counts."""
        return int((self.pixels > 0).sum())

    @property
    def classes(self) -> tuple[int, ...]:
        """The classes that count."""
        return tuple(k for k in range(self.bins.count.shape[0]) if k != self.background)

    def of_images(self, error: str = "ece") -> np.ndarray:
        """Return the error of each image, averaged over its classes, (images,).

        Parameters
        ----------
        error
            "ece", "average_ce" or "mce".

        Returns
        -------
        np.ndarray
            One error per image.
        """
        return self._errors(error)[:, list(self.classes)].mean(axis=1)

    def value(self, error: str = "ece", *, level: float = 0.95) -> Interval:
        """Return the mean over images and classes, with its interval by image.

        Parameters
        ----------
        error
            "ece", "average_ce" or "mce".
        level
            Level of the intervals, such as 0.95.

        Returns
        -------
        Interval
            The error with its interval.
        """
        return _interval(self.of_images(error), level)

    def by_class(self, error: str = "ece", *, level: float = 0.95) -> dict[int, Interval]:
        """Return the mean over the images for each class.

        Parameters
        ----------
        error
            "ece", "average_ce" or "mce".
        level
            Level of the intervals, such as 0.95.

        Returns
        -------
        dict[int, Interval]
            The error with its interval, by class.
        """
        return {k: _interval(self._errors(error)[:, k], level) for k in self.classes}

    def accuracy(self, *, level: float = 0.95) -> Interval:
        """Return the mean over the images of the share of right pixels.

        Parameters
        ----------
        level
            Level of the intervals, such as 0.95.

        Returns
        -------
        Interval
            The accuracy with its interval.
        """
        some = self.pixels > 0
        return _interval(self.correct[some] / self.pixels[some], level)

    def _errors(self, error: str) -> np.ndarray:
        if error not in ERRORS:
            raise InputError("error", f"be one of {', '.join(ERRORS)}", repr(error))
        return self.errors[error][self.pixels > 0]

    def caption(self) -> str:
        """Return the numbers of images and pixels, in words."""
        left_out = "" if self.background is None else f", class {self.background} left out"
        return f"{self.images:,} images, {self.pixels.sum():,} pixels{left_out}: intervals by image"

    def table(self, class_names: Sequence[str] | None = None, *, level: float = 0.95) -> list[Row]:
        """Return the cells of the table as text; the first row holds the heads.

        Parameters
        ----------
        class_names
            Names of the classes, in the order of the columns.
        level
            Level of the intervals, such as 0.95.

        Returns
        -------
        list[Row]
            The rows.
        """
        rows: list[Row] = [["class", "error", "value", f"{format_percent(level)} interval"]]
        for error in ERRORS:
            known = self.by_class(error, level=level)
            named = {str(k) if class_names is None else class_names[k]: i for k, i in known.items()}
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
    """Return count, probability and hits of every class in the bins of its probability, (3, classes, bins)."""
    k = logits.shape[1]
    probs = softmax(logits.astype(np.float64), axis=1)
    cuts = cut_points(equal_width(bins), rounding=rounding_error(logits))
    cell = np.searchsorted(cuts, probs, side="left") + bins * np.arange(k)
    hits = np.zeros_like(probs)
    hits[np.arange(len(probs)), labels] = 1.0
    sums = [np.bincount(cell.ravel(), w, k * bins) for w in (np.ones(probs.size), probs.ravel(), hits.ravel())]
    return np.stack(sums).reshape(3, k, bins)


def _interval(values: np.ndarray, level: float) -> Interval:
    """Return the mean with Student's interval."""
    n, tail = len(values), tail_share(level)
    if not n:
        return Interval(math.nan, math.nan, math.nan, level)
    mean = float(values.mean())
    if n < 2:
        return Interval(mean, math.nan, math.nan, level)
    half_width = t_quantile(tail, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, max(mean - half_width, 0.0), min(mean + half_width, 1.0), level)
