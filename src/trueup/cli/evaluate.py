"""Verbs that score predictions: evaluate, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from trueup.cli import forecasts
from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_scores, print_table, working


def evaluate(
    file: Annotated[str, o.argument("FILE", "Logits and labels; or a folder, pattern or address of shards.")],
    *,
    reader: o.Reader,
    columns: o.ForecastColumns,
    sharding: o.Sharding,
    scoring: Annotated[o.Scoring, o.without(o.Scoring, "n_folds")],
    output: o.Output,
) -> None:
    """Measure the calibration of predictions, with bootstrap intervals and a test.

    Shards are read once, in chunks, so they need not fit in memory. For forecasts of a number, name the columns with
    --mean, --std and --target, or with --quantiles and --target.

      $ trueup evaluate test.npz
      $ trueup evaluate test.csv --probs --labels target
      $ trueup evaluate both.npz --split test --json
      $ trueup evaluate test.parquet --metric ece --metric smooth_ece --bins 20
      $ trueup evaluate answers.jsonl --confidence stated --correct right --groups category
      $ trueup evaluate risk.csv --probs --logits well,ill --labels outcome --event ill --sample-weight w
      $ trueup evaluate visits.csv --clusters patient
      $ trueup evaluate segmentation.npz --class-axis first --ignore-index 255
      $ trueup evaluate tags.npz --multilabel
      $ trueup evaluate 'predictions/*.parquet' --scheduler local:2 --skip-bad
      $ trueup evaluate demand.csv --mean mu --std sigma --target sold
      $ trueup evaluate demand.csv --quantiles q05,q50,q95 --target sold
    """
    options = {} if columns else _scoring_options(scoring)
    scores: Any
    of_labels: Any = None
    with working("measuring", quiet=output.quiet):
        if columns:
            forecasts.require_only(reader, sharding, scoring)
            scores = forecasts.evaluate(file, columns, reader, scoring)
        elif reader.is_sharded(file, sharding.scheduler):
            from trueup.metrics.sharded import evaluate_shards

            with reader.open_shards(file, sharding) as (shards, executor):
                options |= o.drop_unset(event=reader.event_number())
                options |= {"executor": executor, "skip_bad": sharding.skip_bad, "progress": not output.quiet}
                scores = evaluate_shards(shards, **options)
        else:
            from trueup.metrics import table

            pair = reader.load(file, sharding.split)
            options |= o.drop_unset(event=reader.event_number(pair.class_names))
            if reader.multilabel:
                from trueup.metrics.multilabel import scores_of_labels

                of_labels = scores_of_labels(pair, **{k: v for k, v in options.items() if k != "metrics"})
            options |= o.drop_unset(class_names=reader.names(pair.class_names))
            scores = table.evaluate(pair.logits, pair.labels, **(options | pair.options()))
    if output.as_json:
        split = {} if columns else {"split": sharding.split}
        labelled = {} if of_labels is None else {"labels": of_labels.to_dict()}
        print_json("evaluate", file=file, **split, verdict=scores.verdict(), scores=scores.to_dict(), **labelled)
        return
    print_scores(scores, quiet=output.quiet)
    if of_labels is not None:
        print()
        print_table(of_labels.table())
        print_remarks(of_labels.note(), quiet=output.quiet)


def compare(
    files: Annotated[
        list[str], o.argument("A B", "Logits and labels of each model, for the same rows in the same order.")
    ],
    *,
    reader: Annotated[o.Reader, o.without(o.Reader, "confidence", "correct", "multilabel")],
    split: Annotated[o.Sharding, o.only("split")],
    scoring: Annotated[o.Scoring, o.without(o.Scoring, "n_folds")],
    output: o.Output,
) -> None:
    """Score two models on the same rows, with paired differences from the first.

    Each further file is another model. Weights, groups and clusters are read from the first file.

      $ trueup compare resnet.npz vit.npz
      $ trueup compare test.npz calibrated.npz --json
      $ trueup compare old.csv new.csv --probs --event 1 --clusters patient
    """
    if len(files) < 2:
        raise ValueError(f"two files are needed, one per model, got {files[0]} alone; `trueup evaluate` scores it")
    from trueup.metrics import table

    names = [Path(file).stem for file in files]
    names = names if len(set(names)) == len(files) else files
    if len(set(names)) < len(files):
        raise ValueError("each model needs its own file, got the same file twice")
    options = _scoring_options(scoring)
    with working("comparing", quiet=output.quiet):
        tables = [reader.load(file, split.split) for file in files]
        stored = tables[0].class_names
        options |= tables[0].options()
        options |= o.drop_unset(event=reader.event_number(stored), class_names=reader.names(stored))
        scores = table.compare({name: model.pair for name, model in zip(names, tables, strict=True)}, **options)
    if output.as_json:
        print_json("compare", files=files, split=split.split, scores=scores.to_dict())
        return
    print_scores(scores, quiet=output.quiet)


def _scoring_options(scoring: o.Scoring) -> dict[str, Any]:
    from trueup._core.registry import METRICS
    from trueup.metrics.table import DEFAULT

    for name in scoring.metric or ():
        o.require_name("metric", dict.fromkeys([*METRICS, *DEFAULT]), name)
    return o.set_options(scoring, "bins", "level", "n_resamples", "seed") | o.drop_unset(metrics=scoring.metric)


register = o.commands("Measure", evaluate, compare)
