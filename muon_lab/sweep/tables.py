"""From rows to a table on disk, and to the summary that a person reads."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from muon_lab.studies.study import OUTCOMES, Row, Study
from muon_lab.sweep.grid import axis_types

_DTYPES: dict[type, Any] = {int: pl.Int64, float: pl.Float64, str: pl.String}
_FACTS: dict[str, Any] = {"rows": pl.Int64, "cols": pl.Int64}


def schema(study: Study) -> dict[str, Any]:
    """Return the columns of a study's table and their types."""
    axes = {name: _DTYPES[kind] for name, kind in axis_types(study).items()}
    metrics = {column.name: pl.Int64 if column.unit == "count" else pl.Float64 for column in study.columns}
    known = axes | _FACTS | metrics | {"outcome": pl.Enum(OUTCOMES)}
    return {name: known.get(name, pl.String) for name in study.row_names}


def frame(study: Study, rows: Iterable[Row]) -> pl.DataFrame:
    """Return rows as a table; what is not reproducible (seconds) stays in the log."""
    return pl.DataFrame([{name: row.get(name) for name in study.row_names} for row in rows], schema=schema(study))


def write(table: pl.DataFrame, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write a table with its provenance inside, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    text = json.dumps(provenance, allow_nan=False, sort_keys=True, ensure_ascii=False)
    table.write_parquet(temporary, metadata={"provenance": text})
    os.replace(temporary, path)


def read_provenance(path: Path) -> dict[str, Any]:
    """Return the provenance inside a table."""
    return json.loads(pl.read_parquet_metadata(path)["provenance"])


def summary(study: Study, table: pl.DataFrame) -> pl.DataFrame:
    """Return median and worst of the headline by the first two of the study's grouping axes that vary."""
    varying = [name for name in study.group if table[name].n_unique() > 1]
    by = (varying + [name for name in study.group if name not in varying])[:2]
    headline = pl.col(study.headline)
    ok = pl.col("outcome") == "ok"
    grouped = table.group_by(by, maintain_order=True).agg(
        pl.len().alias("cases"),
        headline.filter(ok).median().alias(f"{study.headline} (median)"),
        headline.filter(ok).max().alias("worst"),
        *(
            (pl.col("outcome") == outcome).sum().alias(outcome)
            for outcome in table["outcome"].unique(maintain_order=True)
            if outcome != "ok"
        ),
    )
    numbers = [name for name, kind in grouped.schema.items() if kind == pl.Float64]
    return grouped.with_columns(pl.col(name).map_elements(_short, pl.String, skip_nulls=False) for name in numbers)


def text(table: pl.DataFrame) -> str:
    """Return a small table as aligned text.

    Examples
    --------
    >>> print(text(pl.DataFrame({"tp": [1, 2], "error": ["0", "0.53"]})))
     tp  error
    ───────────
      1      0
      2   0.53
    """
    columns = [[name, *("–" if value is None else str(value) for value in table[name])] for name in table.columns]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        " " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([lines[0], "─" * (len(lines[0]) + 1), *lines[1:]])


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
