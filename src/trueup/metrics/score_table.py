"""What every table of scores does: metrics of one or several methods, with intervals and paired differences."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from typing import Any

from trueup.core.formatting import Row, format_interval, format_number, format_percent, html_table, text_table
from trueup.metrics.intervals import Interval


class ScoreTable:
    """A table of `values` by method and metric, and of `changes` from the first method: as text, HTML, JSON, pandas."""

    values: Mapping[str, Mapping[str, Interval]]
    changes: Mapping[str, Mapping[str, Interval]]
    level: float

    def __getitem__(self, key: str | tuple[str, str]) -> Interval:
        method, metric = key if isinstance(key, tuple) else (self.methods[0], key)
        if isinstance(key, str) and len(self.methods) > 1:
            raise KeyError(
                f"there are several methods: ask for (method, {key!r}), method one of {', '.join(self.methods)}"
            )
        return self.values[method][metric]

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in order."""
        return tuple(self.values)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        return tuple(self.values[self.methods[0]])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        raise NotImplementedError

    def to_json(self, **options: Any) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), **options)

    def to_pandas(self) -> Any:
        """A data frame with one row for each method and metric (needs pandas)."""
        import pandas as pd

        nothing = Interval(math.nan, math.nan, math.nan)
        records = []
        for name in self.methods:
            for metric, found in self.values[name].items():
                change = self.changes.get(name, {}).get(metric, nothing)
                records.append(
                    [name, metric, found.value, found.low, found.high, change.value, change.low, change.high]
                )
        columns = ["method", "metric", "value", "low", "high", "change", "change_low", "change_high"]
        return pd.DataFrame(records, columns=columns)

    def __str__(self) -> str:
        return "\n\n".join([self.caption(), text_table(self.table()), *self.notes()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes())
        style = "<style scoped>.trueup td { text-align: right } .trueup tbody th { text-align: left }</style>"
        caption = html.escape(self.caption())
        return f'<div class="trueup">{style}<p>{caption}</p>{html_table(head, rows)}{notes}</div>'

    def caption(self) -> str:
        """How much was scored."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What is said below the table."""
        raise NotImplementedError

    def digits(self, metric: str) -> int:
        """How many digits behind the point a metric is shown with."""
        return 4

    def table(self) -> list[Row]:
        """Its cells as text, the first row the heads."""
        level = format_percent(self.level)
        if len(self.methods) == 1:
            found = self.values[self.methods[0]]
            return [["metric", "value", f"{level} interval"]] + [
                [
                    metric,
                    format_number(i.value, digits=self.digits(metric)),
                    format_interval(i.low, i.high, digits=self.digits(metric)),
                ]
                for metric, i in found.items()
            ]
        if len(self.methods) == 2:
            one, two = self.methods
            rows = [["metric", one, two, "change", f"{level} interval"]]
            for metric in self.metrics:
                change, digits = self.changes[two][metric], self.digits(metric)
                values = [format_number(self.values[name][metric].value, digits=digits) for name in self.methods]
                rows.append(
                    [
                        metric,
                        *values,
                        format_number(change.value, sign=True, digits=digits),
                        format_interval(change.low, change.high, sign=True, digits=digits),
                    ]
                )
            return rows
        rows = [["method", *self.metrics]]
        for name in self.methods:
            marks = {
                metric: "*" if i.low > 0 or i.high < 0 else " " for metric, i in self.changes.get(name, {}).items()
            }
            cells = (
                format_number(i.value, digits=self.digits(metric)) + marks.get(metric, " ")
                for metric, i in self.values[name].items()
            )
            rows.append([name, *cells])
        return rows


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data as JSON can hold it: what is not finite is None."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
