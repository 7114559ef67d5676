"""The verb decide: the confidence above which answers are safe, and what to expect of files without labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, require_output, working


@dataclass(frozen=True)
class Files:
    """Input and output files of `decide`."""

    val: Path = o.argument("VAL", "Logits and labels that were used neither for training nor for calibration.")
    new: Path | None = o.argument(
        "NEW", "Logits without labels: estimate their class frequencies and accuracy.", default=None
    )
    out: Path | None = o.output_file("FILE", "With NEW: save a calibrator for its class frequencies.")


@dataclass(frozen=True)
class Promise:
    """The guarantee, and its confidence level."""

    risk: str | None = o.option("NAME", "Bound the error, false_discovery_rate or false_positive_rate (default error).")
    max_risk: float | None = o.option("SHARE", "The largest risk allowed (default 0.02).")
    level: float | None = o.option("SHARE", "Confidence level of the guarantee (default 0.95).")
    method: str | None = o.option("NAME", "Calibrate first, on half of the rows.", "--method", "-m")


def decide(
    files: Files,
    *,
    promise: Promise,
    reader: Annotated[
        o.Reader,
        o.only(
            *("clusters", "probs", "logits", "labels", "confidence", "correct", "class_names"),
            event="Decide by the probability of this class, given by number or name.",
            groups="One threshold per group of this column; all guarantees hold jointly.",
        ),
    ],
    split: Annotated[o.Sharding, o.only("split")],
    seed: o.Seed = None,
    output: o.Output,
) -> None:
    """Find the confidence above which the error rate is bounded, with a guarantee.

    Rows at or above the threshold are answered, and the others are left for review. With probability --level, at most
    a share --max-risk of the answers is wrong. With --event, the threshold is for flagging the event, and the net
    benefit of acting on the flags is shown. With NEW, its class frequencies and accuracy are estimated too; if the
    frequencies differ, no threshold is given.

      $ trueup decide val.npz --max-risk 0.02
      $ trueup decide risk.csv --event ill --class-names well,ill --max-risk 0.1
      $ trueup decide val.npz --risk false_positive_rate --max-risk 0.01 --event 1
      $ trueup decide answers.csv --confidence stated --max-risk 0.1 --groups category
      $ trueup decide val.npz --max-risk 0.05 -m temperature
      $ trueup decide val.npz traffic.npz -o corrected.safetensors
    """
    from trueup._core.registry import METHODS
    from trueup.decisions import EventRisk

    val, new, out = files.val, files.new, files.out
    if reader.clusters is not None and reader.event is not None:
        raise ValueError("--clusters does not work with --event: the net benefit assumes independent rows")
    if promise.method is not None:
        o.require_name("method", METHODS, promise.method)
    if out is not None:
        if new is None:
            raise ValueError("--output saves a calibrator for the class frequencies of NEW: name the file NEW too")
        require_output(out, ".safetensors", reads=(val, new))
    with working("deciding", quiet=output.quiet):
        table = reader.load(val, split.split) if split.split else reader.load_half(val, "val")
        number, names = reader.event_number(table.class_names), reader.names(table.class_names)
        options = o.set_options(promise)
        if number is not None:
            options["risk"] = EventRisk(options.get("risk", "false_discovery_rate"), number, names)
        chosen = _threshold(table, reader.confidence is not None, options)
        parts: dict[str, Any] = {"prior": None, "performance": None, "net_benefit": None}
        if number is not None:
            from trueup.decisions import net_benefit

            parts["net_benefit"] = net_benefit(*table.pair, event=number, class_names=names)
        if new is not None:
            estimates = _without_labels(reader, new, table.pair, number, o.drop_unset(seed=seed))
            parts["prior"], parts["performance"] = estimates
            if out is not None:
                from trueup.io.load_save import save

                n_classes = table.logits.shape[1]
                save(parts["prior"].calibrator, out, n_classes=n_classes, summary={"made for": new.name})
    prior, text = parts["prior"], str(chosen)
    if prior is not None and prior.moved:
        chosen, text = None, _WITHHELD
    if output.as_json:
        print_json(
            "decide", val=val, new=new, output=out, threshold=None if chosen is None else chosen.to_dict(), text=text,
            **{name: None if part is None else part.to_dict() for name, part in parts.items()},
        )  # fmt: skip
        return
    print(text)
    for part in parts.values():
        if part is not None:
            print(f"\n{part}")
    if prior is not None and table.clusters is not None:
        from trueup.decisions.label_shift import INDEPENDENT

        print(f"\n{INDEPENDENT}")
    if out is not None and not output.quiet:
        print(f"\nWritten: {out}")


_WITHHELD = (
    "No threshold is given: the class frequencies of NEW differ from those of VAL, so a promise from VAL does not hold "
    "for NEW. Label some rows of NEW and run decide on them."
)


def _threshold(table: Any, stated: bool, options: dict[str, Any]) -> Any:
    from trueup.decisions import calibrated_threshold, threshold

    make = calibrated_threshold if "method" in options else threshold
    options |= {"groups": o.join_groups(table.groups)}
    if table.clusters is not None:
        options |= {"clusters": {table.cluster_name: table.clusters}}
    if stated:
        if options.get("risk", "error") != "error":
            raise ValueError("--confidence bounds the share of wrong answers: leave out --event and --risk")
        # A right answer is the event, so wrong answers among those given are its false discoveries.
        chosen = make(*table.pair, **options | {"risk": "false_discovery_rate"})
        if options["groups"] is None:
            return replace(chosen, risk="error", event=None)
        return replace(chosen, groups={g: replace(one, risk="error", event=None) for g, one in chosen.groups.items()})
    return make(*table.pair, **options)


def _without_labels(
    reader: o.Reader, new: Path, pair: Any, event: int | None, options: dict[str, Any]
) -> tuple[Any, Any]:
    from trueup.decisions import PerformanceMetrics, estimate_performance, estimate_prior

    reader = replace(reader, groups=None, clusters=None)
    unlabelled = reader.load_unlabelled(new)
    rows = reader.load_half(new, "test").logits if unlabelled is None else unlabelled
    prior = estimate_prior(rows, val=tuple(pair), **options)
    if event is not None:
        options["metrics"] = PerformanceMetrics(("accuracy", "f1", "roc_auc"), event=event)
    return prior, estimate_performance(rows, val=tuple(pair), shift=prior.moved, **options)


register = o.commands("Decide", decide)
