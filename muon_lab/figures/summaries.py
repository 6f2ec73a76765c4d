"""From rows to what is drawn: which rows count, and medians with quartiles. The only arithmetic between the two."""

from collections.abc import Sequence

import polars as pl


def shown(table: pl.DataFrame, axes: Sequence[str], metrics: Sequence[str]) -> tuple[pl.DataFrame, str]:
    """Return the rows that ended well and have every metric, and a sentence on the others, "" if there are none.

    Raises
    ------
    ValueError
        If a column is missing, or no row is left.

    Examples
    --------
    >>> table = pl.DataFrame({"tp": [1, 2], "outcome": ["ok", "error"], "relative": [0.5, None]})
    >>> rows, note = shown(table, ["tp"], ["relative"])
    >>> rows["tp"].to_list(), note
    ([1], '1 of 2 cases not shown')
    """
    missing = [name for name in (*axes, "outcome", *metrics) if name not in table.columns]
    if missing:
        raise ValueError(f"table lacks the columns {', '.join(missing)}; it has {', '.join(table.columns)}")
    texts = [name for name, dtype in table.schema.items() if dtype in (pl.Enum, pl.Categorical, pl.Null)]
    table = table.with_columns(pl.col(texts).cast(pl.String)) if texts else table
    table = table.with_columns(pl.col(*metrics).cast(pl.Float64))
    kept = table.filter(pl.col("outcome") == "ok").drop_nulls(list(metrics))
    if kept.is_empty():
        raise ValueError(f"none of the {len(table)} rows of the table ended ok with {' and '.join(metrics)} measured")
    left = len(table) - len(kept)
    return kept, f"{left} of {len(table)} cases not shown" if left else ""


def quartiles(rows: pl.DataFrame, by: Sequence[str], metric: str) -> pl.DataFrame:
    """Return `low`, `median` and `high` of a metric (its quartiles) for every group, sorted by the group.

    Examples
    --------
    >>> rows = pl.DataFrame({"tp": [2, 1, 2, 2], "relative": [1.0, 5.0, 2.0, 4.0]})
    >>> quartiles(rows, ["tp"], "relative").rows()
    [(1, 5.0, 5.0, 5.0), (2, 1.5, 2.0, 3.0)]
    """
    column = pl.col(metric)
    low, high = (column.quantile(part, "linear") for part in (0.25, 0.75))
    groups = rows.group_by(*by).agg(low.alias("low"), column.median().alias("median"), high.alias("high"))
    return groups.sort(*by, nulls_last=True)


def several(rows: pl.DataFrame, name: str) -> bool:
    """Return whether a column has more than one value, nulls aside."""
    return rows[name].drop_nulls().n_unique() > 1
