"""What decisions promise, measured: thresholds, prediction sets, label shift, performance without labels, plans.

    python benchmarks/decisions.py                 every part, some twenty minutes on one core
    python benchmarks/decisions.py thresholds sets some parts
    python benchmarks/decisions.py --small         a smoke run of seconds; its figures mean little

TRUEUP_DATA names the folder of real logits; parts that need it are skipped without. MAPIE, TorchCP and NannyML stand
beside ours where they are installed.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

ALPHA = 0.1


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description="Guarantees of decisions, by simulation and on real logits.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.parts or PARTS:
        began = perf_counter()
        print(f"\n{name}", flush=True)
        PARTS[name](given.small)
        print(f"  {perf_counter() - began:.0f} s", flush=True)


def thresholds(small: bool) -> None:
    """How often a promise fails, and how much is answered beside MAPIE's risk control.

    Calibration sets are drawn from a population that is known: simulated, or the rows of a real file.
    """
    from trueup.decisions import threshold

    sets, compared = (40, 3) if small else (2000, 100)
    rng = np.random.default_rng(1)
    for title, confidence, right in populations(small):
        size = len(confidence)
        order = np.argsort(-confidence)
        running = np.cumsum(1 - right[order]) / np.arange(1, size + 1)
        for n, bound in ((500, 0.1), (2000, 0.05), (2000, 0.02)):
            if small and n > 500:
                continue
            failed, none, ours, theirs = 0, 0, [], {"bonferroni_holm": [], "fixed_sequence": []}
            for number in range(sets):
                rows = rng.integers(0, size, n)
                c, correct = confidence[rows], (rng.random(n) < right[rows]).astype(np.int64)
                pair = np.stack([np.zeros(n), np.log(c / (1 - c))], axis=1)
                found = threshold(pair, correct, risk="false_discovery_rate", max_risk=bound)
                kept = np.searchsorted(-confidence[order], -found.threshold * (1 - 1e-9), side="right")
                none += not found.promised
                failed += bool(kept and running[kept - 1] > bound)
                if number < compared:
                    ours.append(kept / size)
                    for method, coverages in theirs.items():
                        best = mapie_threshold(c, correct, bound, method)
                        if best is not None:
                            coverages.append(float((confidence >= best).mean()))
            beside = ", ".join(f"MAPIE {name} {np.mean(x):.4f}" for name, x in theirs.items() if x)
            print(
                f"  {title:<24} n {n:5d}, at most {bound}: fails {failed / sets:.4f} of {sets} (allowed 0.06), "
                f"nothing promised {none / sets:.3f}; coverage ours {np.mean(ours):.4f}, {beside}",
                flush=True,
            )


def populations(small: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Title, confidence of each row and the probability that it is right."""
    size = 20_000 if small else 200_000
    for title, temperature, decimals in (("smooth", 1.0, None), ("overconfident", 1.5, None), ("rounded", 1.0, 2)):
        z = np.random.default_rng(1).normal(size=(size, 10)) * 5
        confidence, right = (
            torch.softmax(torch.from_numpy(z / t), dim=1).amax(dim=1).numpy() for t in (1, temperature)
        )
        if decimals is not None:
            confidence = np.clip(confidence.round(decimals), 0.5, 0.99)
        yield title, confidence, right
    folder = os.environ.get("TRUEUP_DATA")
    if folder is None or small:
        return
    for name in FILES:
        z, y = real(name) or (np.zeros((0, 2)), np.zeros(0))
        p = torch.softmax(torch.from_numpy(z), dim=1)
        yield name, np.clip(p.amax(dim=1).numpy(), 1e-9, 1 - 1e-9), (p.argmax(dim=1).numpy() == y).astype(np.float64)
    for name in ("gpt-4.1-mini", "Qwen3-14B"):
        with (Path(folder) / "llm" / f"mmlu_pro_{name}.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["stated_confidence"]]
        stated = np.array([float(row["stated_confidence"]) for row in rows])
        yield f"stated by {name}", np.clip(stated, 1e-6, 1 - 1e-6), np.array([float(row["correct"]) for row in rows])


def mapie_threshold(confidence: np.ndarray, correct: np.ndarray, bound: float, method: str) -> float | None:
    """MAPIE's threshold with the same promise; above all where there is none; None if MAPIE is not there."""
    try:
        from mapie.risk_control import BinaryClassificationController, precision
    except ModuleNotFoundError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller = BinaryClassificationController(
            lambda x: np.stack([1 - x[:, 0], x[:, 0]], axis=1), precision, 1 - bound, 0.95, fwer_method=method
        )
        controller.calibrate(confidence[:, None], correct)
    best = [float(np.ravel(one)[0]) for one in np.ravel(controller.valid_predict_params)]
    return min(best) if best else 2.0


FILES = ("cifar10_densenet40", "cifar10_resnet20", "cifar100_wrn16x4_probs")


def real(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """All rows of a file, as logits."""
    folder = os.environ.get("TRUEUP_DATA")
    if folder is None:
        print("  skipped: TRUEUP_DATA names no folder")
        return None
    from trueup.convert import from_probs

    with np.load(Path(folder) / "logits" / f"{name}.npz") as file:
        if "probs" in file:
            return from_probs(file["probs"].astype(np.float64), floor=1e-12), file["labels"].astype(np.int64)
        parts = [(file[f"{half}_logits"], file[f"{half}_labels"]) for half in ("val", "test")]
    return np.concatenate([z for z, _ in parts]).astype(np.float64), np.concatenate([y for _, y in parts]).astype(int)


def sets(small: bool) -> None:
    """Coverage over splits of real files, and sizes beside MAPIE and TorchCP."""
    from trueup.decisions import PredictionSets, Raps
    from trueup.decisions.prediction_sets import conformal_quantile

    splits = 10 if small else 500
    rng = np.random.default_rng(0)
    for name in FILES[: 1 if small else 3]:
        if (pair := real(name)) is None:
            return
        z, y = pair
        n = len(y) // 2
        target = np.ceil((n + 1) * (1 - ALPHA)) / (n + 1)
        options: dict[str, dict[str, Any]] = {
            "lac": {"score": "lac"}, "aps": {"score": "aps", "seed": None},
            "aps randomised": {"score": "aps", "seed": 0}, "raps": {"score": Raps(0.01, 2), "seed": None},
        }  # fmt: skip
        for title, extra in options.items():
            own = PredictionSets.fit(z, y, coverage=1 - ALPHA, **extra).label_scores(z, y)
            covered, size = [], []
            for number in range(splits):
                order = rng.permutation(len(y))
                limit = conformal_quantile(own[order[:n]], 1 - ALPHA)
                covered.append(float((own[order[n:]] <= limit).mean()))
                if number < 3:
                    rule = PredictionSets.fit(z[order[:n]], y[order[:n]], coverage=1 - ALPHA, **extra)
                    chosen = rule(z[order[n:]])
                    held = chosen[np.arange(len(y) - n), y[order[n:]]].mean()
                    assert abs(held - covered[-1]) < 1e-12, (held, covered[-1])
                    size.append(float(chosen.sum(axis=1).mean()))
            error = float(np.std(covered) / np.sqrt(splits))
            off = (np.mean(covered) - target) / error
            print(
                f"  {name:<24} {title:<15} coverage {np.mean(covered):.5f}, wanted {target:.5f}, {off:+.2f} standard "
                f"errors over {splits} splits; mean size {np.mean(size):.4f}",
                flush=True,
            )
        half = np.random.default_rng(0).permutation(len(y))
        compare_sizes(z[half[:n]], y[half[:n]], z[half[n:]], options)


def compare_sizes(z: np.ndarray, y: np.ndarray, new: np.ndarray, options: dict[str, dict[str, Any]]) -> None:
    """The same split, the same options, without randomness."""
    from trueup._core.registry import METHODS
    from trueup.decisions import PredictionSets

    # Softened, for sums near 1 lose their digits in TorchCP; ours are summed from the small end.
    soften = METHODS["temperature"](z, y)
    z, new = soften(z), soften(new)
    z64, new64, y64 = torch.from_numpy(z), torch.from_numpy(new), torch.from_numpy(y)
    for score in ("lac", "aps", "raps"):
        ours = PredictionSets.fit(z64, y64, coverage=1 - ALPHA, **options[score])(new64)
        words = [f"ours {ours.double().sum(dim=1).mean():.4f}"]
        theirs = torchcp_sets(score, z64, y64, new64, options[score])
        if theirs is not None:
            same = (ours == theirs.bool()).all(dim=1).double().mean()
            words.append(f"TorchCP {theirs.double().sum(dim=1).mean():.4f} (the same sets in {same:.4f} of the rows)")
        # MAPIE's APS draws at random when it calibrates and not when it predicts: no option of ours is the same.
        mapie = mapie_sets(score, z, y, new) if score == "lac" else None
        if mapie is not None:
            same = (ours.numpy() == mapie).all(axis=1).mean()
            words.append(f"MAPIE {mapie.sum(axis=1).mean():.4f} (the same in {same:.4f})")
        print(f"    {score}: mean size {', '.join(words)}", flush=True)


def torchcp_sets(score: str, z: torch.Tensor, y: torch.Tensor, new: torch.Tensor, options: dict[str, Any]) -> Any:
    """TorchCP's sets; None if it is not there."""
    predictors, scores = (import_peer(f"torchcp.classification.{part}") for part in ("predictor", "score"))
    if predictors is None or scores is None:
        return None
    makers: dict[str, Callable[[], Any]] = {
        "lac": scores.LAC,
        "aps": lambda: scores.APS(randomized=False),
        "raps": lambda: scores.RAPS(randomized=False, penalty=options["score"].penalty, kreg=options["score"].rank),
    }
    predictor = predictors.SplitPredictor(makers[score](), alpha=ALPHA)
    predictor.calculate_threshold(z, y)
    return predictor.predict_with_logits(new)


class Probabilities:
    """An estimator whose rows are logits."""

    def __init__(self, classes: int) -> None:
        self.classes_ = np.arange(classes)
        self.is_fitted_ = True

    def fit(self, x: Any, y: Any) -> Probabilities:
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return torch.softmax(torch.from_numpy(np.asarray(x)).double(), dim=1).numpy()

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x).argmax(axis=1)


def mapie_sets(score: str, z: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """MAPIE's sets; None if it is not there."""
    try:
        from mapie.classification import SplitConformalClassifier
        from sklearn.base import BaseEstimator, ClassifierMixin
    except ModuleNotFoundError:
        return None
    estimator = type("Estimator", (Probabilities, ClassifierMixin, BaseEstimator), {})(z.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rule = SplitConformalClassifier(estimator, 1 - ALPHA, score, prefit=True, random_state=0)
        rule.conformalize(z, y)
        extra = {"include_last_label": False} if score == "aps" else None
        return np.asarray(rule.predict_set(new, conformity_score_params=extra)[1])[:, :, 0].astype(bool)


def speed(small: bool) -> None:
    """APS of many rows of a thousand classes, turn by turn in one process."""
    from trueup.decisions import PredictionSets

    rows, classes, calibration = (500, 100, 200) if small else (50_000, 1000, 10_000)
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(rows + calibration, classes)).astype(np.float32) * 3)
    y = (z + torch.from_numpy(rng.gumbel(size=z.shape).astype(np.float32))).argmax(dim=1)
    val, labels, new = z[:calibration], y[:calibration], z[calibration:]

    def ours() -> Any:
        return PredictionSets.fit(val, labels, score="aps", coverage=1 - ALPHA, seed=None)(new)

    def torchcp() -> Any:
        return torchcp_sets("aps", val, labels, new, {})

    def mapie() -> Any:
        return mapie_sets("aps", val.numpy(), labels.numpy(), new.numpy())

    for name, run in (("ours", ours), ("TorchCP", torchcp), ("MAPIE", mapie)):
        took = []
        for _ in range(1 if small or name == "MAPIE" else 3):
            began = perf_counter()
            result = run()
            took.append(perf_counter() - began)
        if result is not None:
            size = np.asarray(result, dtype=bool).sum(axis=1).mean()
            print(f"  {name:<8} {min(took):7.2f} s for {rows:,} × {classes:,}, mean size {size:.3f}", flush=True)


def shift(small: bool) -> None:
    """Accuracy gained by correcting for the class frequencies, and coverage of their intervals."""
    from trueup._core.registry import METHODS
    from trueup.decisions import estimate_prior

    if (pair := real(FILES[0])) is None:
        return
    z, y = pair
    rng = np.random.default_rng(0)
    draws, rows, resamples = (2, 500, 10) if small else (50, 2000, 100)
    for concentration in (0.1, 0.3, 1.0, 3.0, 10.0, None):
        gains, inside = [], []
        for number in range(draws):
            prior = np.full(10, 0.1) if concentration is None else rng.dirichlet(np.full(10, concentration))
            prior = np.maximum(prior, 0) / prior.sum()
            order = rng.permutation(len(y))
            val, rest = (z[order[:5000]], y[order[:5000]]), order[5000:]
            at = shifted_rows(rng, rest, y, prior, rows)
            new, truth = z[at], y[at]
            plain = METHODS["bias_corrected_temperature"](*val)
            found = estimate_prior(new, val=val, n_resamples=resamples, seed=number)
            before, after = (np.asarray(c(new)).argmax(axis=1) for c in (plain, found.calibrator))
            gains.append(float((after == truth).mean() - (before == truth).mean()))
            inside.append(float(((found.low <= prior) & (prior <= found.high)).mean()))
        title = "no shift" if concentration is None else f"Dirichlet({concentration:g})"
        print(
            f"  {title:<14} accuracy {np.mean(gains):+.5f} (least {min(gains):+.4f}), intervals cover "
            f"{np.mean(inside):.4f} over {draws} draws of up to {rows:,} rows",
            flush=True,
        )


def shifted_rows(rng: np.random.Generator, pool: np.ndarray, y: np.ndarray, prior: np.ndarray, rows: int) -> np.ndarray:
    """Rows of the pool with these class frequencies, none twice: as many as the rarest class in the pool allows."""
    by_class = [pool[y[pool] == k] for k in range(len(prior))]
    fits = min(len(members) / share for members, share in zip(by_class, prior, strict=True) if share > 0)
    counts = rng.multinomial(int(min(rows, 0.9 * fits)), prior)
    return np.concatenate([members[:count] for members, count in zip(by_class, counts, strict=True)])


def unlabelled(small: bool) -> None:
    """How often intervals hold the realised accuracy, and CBPE's point estimate."""
    from trueup.decisions import estimate_performance
    from trueup.decisions.unlabelled_performance import soft_roc_auc

    if (pair := real(FILES[1])) is None:
        return
    z, y = pair
    rng = np.random.default_rng(0)
    for title, splits, resamples, shifted in (
        ("in distribution", 500, 60, False), ("label shift, corrected", 300, 60, True),
    ):  # fmt: skip
        splits = 3 if small else splits
        held, width = 0, []
        for number in range(splits):
            order = rng.permutation(len(y))
            val, rest = order[:3000], order[3000:]
            rows = rest[:3000]
            if shifted:
                rows = shifted_rows(rng, rest, y, rng.dirichlet(np.ones(10)), 3000)
            found = estimate_performance(
                z[rows], val=(z[val], y[val]), shift=shifted, n_resamples=resamples, seed=number
            )
            one, predicted = found["accuracy"], z[rows].argmax(axis=1)
            if found.corrected is not None:
                one, predicted = found.corrected["accuracy"], corrected_classes(z[rows], z[val], y[val])
            truth = float((predicted == y[rows]).mean())
            held += one.low <= truth <= one.high
            width.append(one.high - one.low)
        print(f"  {title}: {held / splits:.4f} of {splits} hold the realised accuracy, width {np.mean(width):.4f}")
    p = np.random.default_rng(0).beta(0.5, 0.8, 5000)
    logits = np.stack([np.log1p(-p), np.log(p)], axis=1)
    ours = estimate_performance(logits, metrics=("accuracy", "f1", "roc_auc"), n_resamples=2 if small else 20)
    theirs = import_peer("nannyml.performance_estimation.confidence_based.metrics")
    if theirs is None:
        print("  NannyML is not there")
        return
    predicted = (p > 0.5).astype(int)
    values = {
        "accuracy": theirs.estimate_accuracy(predicted, p),
        "f1": theirs.estimate_f1(predicted, p),
        "roc_auc": theirs.estimate_roc_auc(p, p),
    }
    for name, value in values.items():
        print(f"  {name}: ours {ours[name].value:.9f}, NannyML {value:.9f}, apart {abs(ours[name].value - value):.1e}")
    assert np.isfinite(soft_roc_auc(p, p))


def corrected_classes(z: np.ndarray, val_z: np.ndarray, val_y: np.ndarray) -> np.ndarray:
    from trueup.decisions import estimate_prior

    found = estimate_prior(z, val=(val_z, val_y), n_resamples=1)
    classes: np.ndarray = np.asarray(found.calibrator(z)).argmax(axis=1)
    return classes


def import_peer(module: str) -> ModuleType | None:
    """A module of a peer, or None where it is not installed; what it imports besides and is missing is not needed."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return None
    for _ in range(30):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(module)
        except ImportError as error:
            sys.modules[str(error.name)] = MagicMock()
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]
    return None


def planning(small: bool) -> None:
    """The power with which the test finds the error that a plan states."""
    from trueup._core.row_scores import score_rows
    from trueup.metrics import consistency, detectable_error

    for name in FILES[1 : 2 if small else 3]:
        if (pair := real(name)) is None:
            return
        z, y = (torch.from_numpy(part) for part in pair)
        rows = score_rows(z, y)
        c = np.clip(rows.confidence, 1e-12, 1 - 1e-12)
        odds = np.log(c) - np.log1p(-c)
        rng = np.random.default_rng(0)
        trials = 10 if small else 1500
        for n in (500, 1000, 5000):
            found = detectable_error(z, y, rows=n)
            for side, error, sign in (("over", found.overconfident, -1), ("under", found.underconfident, 1)):
                low, high = 0.0, 6.0
                for _ in range(50):
                    middle = (low + high) / 2
                    gap = np.abs(1 / (1 + np.exp(-odds * np.exp(sign * middle))) - c).mean()
                    low, high = (middle, high) if gap < error else (low, middle)
                truth = 1 / (1 + np.exp(-odds * np.exp(sign * high)))
                detected = 0
                for trial in range(trials):
                    at = rng.integers(0, len(c), n)
                    # The top confidence as an event: the test sees the same bins, of two columns.
                    pair_of_row = torch.from_numpy(np.stack([np.zeros(n), odds[at]], axis=1))
                    outcome = torch.from_numpy((rng.random(n) < truth[at]).astype(np.int64))
                    detected += consistency(pair_of_row, outcome, n_resamples=1000, seed=trial).p_value <= 0.05
                print(
                    f"  {name}, {n:,} rows, {side}confident: error {error:.4f} detected in {detected / trials:.3f} of "
                    f"{trials:,}",
                    flush=True,
                )


PARTS: dict[str, Callable[[bool], None]] = {
    "thresholds": thresholds,
    "sets": sets,
    "speed": speed,
    "shift": shift,
    "unlabelled": unlabelled,
    "planning": planning,
}

if __name__ == "__main__":
    main()
