"""Tables of the studies on tensor parallelism, every number drawn at random but what a figure says is a rule."""

from itertools import product

import numpy as np
import polars as pl

LAYOUTS = ("duplicated", "distributed", "gram", "owner", "blockwise", "periodic")

#: Model, layer, rows, cols, cut axis.
LAYERS = (
    ("small", "attn.q", 128, 128, 0),
    ("small", "mlp.up", 512, 128, 0),
    ("small", "attn.k", 32, 128, 0),
    ("large", "mlp.down", 128, 1024, 1),
)


def _frame(points, schema):
    return pl.DataFrame(points, schema=schema, orient="row").with_columns(outcome=pl.lit("ok"))


def volume(layers=LAYERS, layouts=LAYOUTS, tps=(2, 4, 8), dtypes=("float32", "bfloat16"), steps=(5,)):
    points = [
        (*layer, layout, tp, dtype, count)
        for layer, layout, tp, dtype, count in product(layers, layouts, tps, dtypes, steps)
    ]
    schema = {"model": pl.String, "layer": pl.String, "rows": pl.Int64, "cols": pl.Int64, "dim": pl.Int64}
    schema |= {"layout": pl.String, "tp": pl.Int64, "dtype": pl.String, "steps": pl.Int64}
    table = _frame(points, schema)
    sent = 2.0 ** np.random.default_rng(0).uniform(12, 30, len(table))
    none, whole = pl.col("layout") == "blockwise", pl.col("layout") == "duplicated"
    table = table.with_columns(
        wire=pl.lit(None, pl.String),
        period=pl.when(pl.col("layout") == "periodic").then(5),
        algorithm=pl.lit("ring"),
        aspect=pl.max_horizontal("rows", "cols") / pl.min_horizontal("rows", "cols"),
        sent_bytes=pl.when(none).then(0.0).otherwise(pl.Series(sent)),
    )
    return table.with_columns(
        sent_ratio=pl.when(pl.col("tp") == 1)
        .then(None)
        .when(whole)
        .then(1.0)
        .otherwise(pl.col("sent_bytes") / 2.0**20),
        beats_duplicated=pl.when(pl.col("layout") == "gram").then(2.5).when(none).then(0.0),
    )


def sharded_training(
    problems=("gpt_small", "quadratic"), optimizers=("muon", "soap"), layouts=LAYOUTS, seeds=(0, 1, 2)
):
    """Return runs in which all layouts but those of blocks are those of one rank, to rounding."""
    blocks = ("blockwise", "periodic")
    points = [
        (problem, optimizer, layout, tp, size, seed)
        for problem, optimizer, layout, tp, seed in product(problems, optimizers, layouts, (2, 4, 8), seeds)
        for size in (("plain", "corrected") if layout in blocks else (None,))
        if optimizer == "muon" or layout in ("duplicated", "blockwise")
    ]
    names = {"problem": pl.String, "optimizer": pl.String, "layout": pl.String, "tp": pl.Int64}
    table = _frame(points, names | {"step_size": pl.String, "seed": pl.Int64})
    noise = np.random.default_rng(1).uniform(1, 2, (13, len(table)))
    curve = {name: pl.Series(noise[place]) for place, name in enumerate(("loss", *(f"loss_{n}0" for n in range(10))))}
    curve["loss_0"] = curve.pop("loss_00")
    apart = pl.col("layout").is_in(blocks)
    return table.with_columns(
        method=pl.when(pl.col("optimizer") == "muon").then(pl.lit("quintic")).otherwise(pl.lit("svd")),
        steps=pl.when(pl.col("optimizer") == "muon").then(5),
        period=pl.when(pl.col("layout") == "periodic").then(5),
        lr=pl.lit(0.01),
        updates=pl.lit(60),
        loss_gap=pl.when(apart).then(pl.Series(noise[11]) - 1.5).otherwise(0.0),
        deviation=pl.when(pl.col("layout") == "duplicated")
        .then(0.0)
        .when(apart)
        .then(pl.Series(noise[12]))
        .otherwise(1e-6 * pl.Series(noise[12])),
        rounding=pl.lit(1e-6),
        tp_invariant=(~apart).cast(pl.Int64),
        **curve,
    )


def reduction(sources=("gaussian", "geometric(100)"), dtypes=("float32", "bfloat16"), methods=("quintic",)):
    kinds = [("hops", "ring"), ("hops", "tree"), ("once", None), ("wide", "ring")]
    points = [
        (source, dtype, method, 5, tp, *kind, seed)
        for source, dtype, method, tp, kind, seed in product(sources, dtypes, methods, (1, 2, 4, 8), kinds, (0, 1, 2))
    ]
    names = {"source": pl.String, "dtype": pl.String, "method": pl.String, "steps": pl.Int64, "tp": pl.Int64}
    table = _frame(points, names | {"sums": pl.String, "order": pl.String, "seed": pl.Int64})
    noise = 2.0 ** np.random.default_rng(2).uniform(-1, 1, (2, len(table)))
    return table.with_columns(gram_ratio=pl.Series(noise[0]), update_ratio=pl.Series(noise[1]))


def errors(sources=("gaussian", "geometric(100)", "recorded"), shapes=((32, 32), (32, 128)), layouts=LAYOUTS):
    """Return rows of the study blockwise for several layouts; of exact blocks theory is right to the last bit."""
    points = [
        (source, f"momentum/200/{seed}" if source == "recorded" else None, *shape, layout, dim, tp, dtype, *how, seed)
        for source, shape, layout, dim, tp, dtype, how, seed in product(
            sources,
            shapes,
            layouts,
            (0, 1),
            (1, 2, 4, 8),
            ("float32", "bfloat16"),
            (("svd", None), ("quintic", 5)),
            (0, 1),
        )
        if how[1] or layout not in ("distributed", "gram")
    ]
    schema = {"source": pl.String, "matrix": pl.String, "rows": pl.Int64, "cols": pl.Int64, "layout": pl.String}
    schema |= {"dim": pl.Int64, "tp": pl.Int64, "dtype": pl.String, "method": pl.String, "steps": pl.Int64}
    table = _frame(points, schema | {"seed": pl.Int64})
    noise = np.random.default_rng(3).uniform(0.2, 1, (3, len(table)))
    blocks = pl.col("layout").is_in(("blockwise", "periodic"))
    expected = (pl.col("source") == "gaussian") & pl.col("steps").is_null() & (pl.col("layout") == "blockwise")
    theory = 0.2 + 0.1 * pl.col("tp").log(2) + 0.2 * pl.col("dim")
    return table.with_columns(
        cut=pl.lit("even"),
        relative=pl.when(expected).then(theory).otherwise(pl.Series(noise[0])),
        nuclear_ratio=pl.when(expected).then(1 + theory).otherwise(1 + pl.Series(noise[1])),
        layout_relative=pl.when(pl.col("tp") == 1).then(0.0).when(blocks).then(pl.Series(noise[2])).otherwise(0.0),
        expected_relative=pl.when(expected).then(theory),
        expected_nuclear=pl.when(expected).then(1 + theory),
    )


DEGENERATE = {
    "one layer": lambda: ("volume", volume(LAYERS[:1])),
    "one matrix": lambda: ("volume", volume(((None, None, 64, 16, 0),), dtypes=("float32",))),
    "blockwise alone": lambda: ("volume", volume(layouts=("blockwise",))),
    "one rank": lambda: ("volume", volume(tps=(1,))),
    "several steps": lambda: ("volume", volume(layouts=("duplicated", "distributed"), steps=(3, 5, 8))),
    "one volume": lambda: ("volume", volume().head(1)),
    "a run": lambda: ("sharded_training", sharded_training().head(1)),
    "no duplicated": lambda: ("sharded_training", sharded_training(layouts=("gram", "blockwise"))),
    "rules of one rank": lambda: ("sharded_training", sharded_training(layouts=("duplicated",))),
    "several learning rates": lambda: (
        "sharded_training",
        pl.concat([sharded_training(("quadratic",)), sharded_training(("quadratic",)).with_columns(lr=pl.lit(0.1))]),
    ),
    "one sum": lambda: ("reduction", reduction().head(1)),
    "one order": lambda: ("reduction", reduction().filter(pl.col("sums") == "once")),
    "sums that are exact": lambda: ("reduction", reduction().with_columns(gram_ratio=1.0, update_ratio=1.0)),
    "two schedules": lambda: ("reduction", reduction(methods=("quintic", "polar_express"))),
    "several layouts of recorded matrices": lambda: (
        "blockwise",
        errors(layouts=("gram", "periodic")).with_columns(sigma_max=1.1, bound=pl.col("tp").sqrt()),
    ),
}
