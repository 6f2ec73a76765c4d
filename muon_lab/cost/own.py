"""The user's own model: a list of layers in TOML, the header of safetensors files, or a Hugging Face configuration.

Of safetensors only the headers are read. Names tell what a matrix is for, as Megatron-LM and Hugging Face call them:
``q_proj``, ``gate_proj`` and their like are cut along their rows by tensor parallelism, ``o_proj`` and ``down_proj``
along their columns; a name that says nothing is kept whole. What could not be placed is in the notes of the model, and
so is what is stored as inputs × outputs (GPT-2's layers, experts in one array) and turned here.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from muon_lab.cost import architecture, families, inventory, reading
from muon_lab.cost.inventory import Layer, Model, variant
from muon_lab.nearest import nearest, unknown

CUTS: Mapping[str, int | None] = {"rows": 0, "columns": 1, "none": None}

#: Patterns of a name's last words, and what such a matrix is: its role (or "" for the role of where it stands) and cut.
KINDS: tuple[tuple[str, str, int | None], ...] = (
    (r"(embed_tokens|word_embeddings|wte|tok_embeddings|embed_in)$", "embedding", 0),
    (r"(lm_head|embed_out|output_layer)$|^output$", "head", 0),
    (r"(wpe|position_embeddings)$", "position", None),
    (r"(mlp|moe|block_sparse_moe|ffn|feed_forward)\.(gate|router)$|router$|gate\.wg$", "router", None),
    (r"indexer\.\w+$", "indexer", None),
    (r"(q_a_proj|kv_a_proj_with_mqa|kv_a_proj)$", "attention", None),
    (
        r"(q_proj|k_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj|c_attn|query_key_value|linear_qkv|wq|wk|wv|c_q|c_k|c_v)$",
        "",
        0,
    ),
    (r"(attn|attention)\.(o_proj|c_proj|dense|out_proj|wo|linear_proj)$|(o_proj|wo)$", "attention", 1),
    (r"(gate_proj|up_proj|gate_up_proj|c_fc|fc1|dense_h_to_4h|linear_fc1|w1|w3)$", "", 0),
    (r"(down_proj|c_proj|fc2|dense_4h_to_h|linear_fc2|w2)$", "", 1),
)

#: Of which group a matrix is a part, or all.
JOINED: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(q_proj|k_proj|v_proj|wq|wk|wv|c_q|c_k|c_v|qkv_proj|c_attn|query_key_value|linear_qkv)$", "qkv"),
    (r"(^|\.)(gate_proj|up_proj|w1|w3|gate_up_proj)$", "gate_up"),
)

#: Names of groups that are kept as one, and what their parts are called.
_WHOLE = r"(^|\.)(qkv_proj|c_attn|query_key_value|linear_qkv|gate_up_proj)$"
_PARTS: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}

#: Layers that GPT-2's code keeps as inputs × outputs, and other code by the same names as outputs × inputs.
CONV1D = r"(^|\.)(c_attn|c_fc|c_proj)$"


def read(name: str, *, qkv: str = "stored", gate_up: str = "stored") -> Model:
    """Return a model by name, or that of a file.

    Parameters
    ----------
    name : str
        One of `inventory.names`, or the path of a ``.toml`` list, of a ``.safetensors`` file, of a folder of such
        files, or of a ``config.json``.
    qkv, gate_up : {"stored", "split", "fused"}
        As for `inventory.get`; of a safetensors file, "stored" is what it holds.

    Raises
    ------
    ValueError
        If there is no such model or file, it cannot be understood, or it has nothing of which a variant could be said;
        one sentence.

    Examples
    --------
    >>> read("gpt2").count
    48
    """
    path, asked = Path(name or "?"), {"qkv": qkv, "gate_up": gate_up}
    if name in inventory.names():
        return _changed(inventory.get(name, qkv="split", gate_up="split"), inventory.get(name, **asked), asked)
    if path.is_dir() or path.suffix == ".safetensors":
        apart = _stored(path)
        model = variant(apart, **asked)
        return _changed(apart, _apart(model, [group for group, how in asked.items() if how == "split"]), asked)
    if path.suffix == ".toml":
        apart = _listed(path)
        return _changed(apart, variant(apart, **asked), asked)
    if path.suffix == ".json":
        apart, fused = _configured(path)
        return _changed(apart, variant(apart, **asked, fused=fused), asked)
    raise ValueError(
        f"{unknown('model', name, inventory.names())}; or give a .toml list, a .safetensors file or a config.json"
    )


#: What the groups of matrices with the same inputs are.
GROUPS: Mapping[str, str] = {"qkv": "queries, keys and values", "gate_up": "gate and up-projection"}


def _changed(apart: Model, model: Model, asked: Mapping[str, str]) -> Model:
    """Return a model as it was asked for, unless it has nothing of which that could be said."""
    for group, how in asked.items():
        if how != "stored" and not any(_group(layer) == group for layer in apart.layers):
            raise ValueError(f"{group} is {how!r}, but {model.name} has no {GROUPS[group]} with the same inputs")
    return model


def _group(layer: Layer) -> str:
    """Return which group a matrix belongs to, as a part or as all of it: "qkv", "gate_up" or ""."""
    return layer.joins.rpartition(".")[2]


def _apart(model: Model, groups: Sequence[str]) -> Model:
    """Take matrices of some groups apart that a file keeps as one.

    Raises
    ------
    ValueError
        For queries, keys and values that are not three times as many rows as columns: shapes do not say how many of
        each there are.
    """
    layers, notes = list[Layer](), list(model.notes)
    for layer in model.layers:
        group, (m, n) = _group(layer), layer.shape
        parts = _PARTS.get(group, ())
        if group not in groups or not re.search(_WHOLE, layer.name):
            layers.append(layer)
            continue
        if m % len(parts) or (group == "qkv" and m != 3 * n):
            raise ValueError(
                f"{group} is 'split', but {model.name} keeps {layer.name!r} of shape {layer.shape} as one, and shapes "
                f"do not say where its {GROUPS[group]} begin: list the layers in a .toml file"
            )
        prefix = layer.name.rpartition(".")[0]
        layers += [replace(layer, name=f"{prefix}.{part}".lstrip("."), shape=(m // len(parts), n)) for part in parts]
        notes.append(f"{layer.name!r} is taken as {len(parts)} equal parts, {GROUPS[group]}")
    return replace(model, layers=tuple(layers), notes=tuple(notes))


def _uncounted(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return a note if there are experts: nothing said how many of them a token passes."""
    if not any(layer.expert and layer.per_block > 1 for layer in layers):
        return ()
    return ("how many experts a token passes is unknown, so a step is estimated as if it passed all of them",)


def _configured(path: Path) -> tuple[Model, tuple[str, ...]]:
    """Return the model of a configuration with all parts apart, and the groups that its own code keeps as one."""
    config = reading.json_object(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    known, worded = architecture.normalised(config, str(path)), architecture.worded(config)
    model = architecture.model(config, name or path.stem)
    notes = families.note(worded) + (("only the language model is read",) if worded is not config else ())
    notes += () if model.active else _uncounted(model.layers)
    return replace(model, source=(str(path),), notes=notes), architecture.fused(known)


def _listed(path: Path) -> Model:
    """Read a list of ``[[layer]]`` tables: name and shape; where they matter, count, role, cut, joins and head (rows of
    one); of experts how many a block has and how many of them a token passes (active).
    """
    content, where = reading.toml(path), str(path)
    reading.only(content, where, ("name", "blocks", "vectors", "layer"))
    rows = reading.tables(content, "layer", where)
    blocks = reading.whole(content, "blocks", where) if "blocks" in content else 0
    layers = tuple(_layer(row, f"{where}: layer {index}", blocks) for index, row in enumerate(rows, 1))
    if len({layer.name for layer in layers}) < len(layers):
        raise ValueError(f"{where}: each layer needs a name of its own")
    vectors = reading.whole(content, "vectors", where) if "vectors" in content else 0
    most = blocks or max((len(layer.blocks) for layer in layers if not layer.excluded), default=1)
    active = _active(rows, layers, where)
    name, notes = reading.text(content, "name", where, path.stem), () if active else _uncounted(layers)
    return Model(name, layers, most, vectors, (where,), active, notes)


def _layer(row: reading.Table, where: str, blocks: int) -> Layer:
    reading.only(row, where, ("name", "shape", "count", "experts", "active", "role", "cut", "joins", "head"))
    shape = row.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(one) is int and one > 0 for one in shape):
        raise ValueError(f"{where}: 'shape' must be two positive whole numbers, outputs and inputs, not {shape!r}")
    experts = reading.whole(row, "experts", where, 1)
    role = reading.text(row, "role", where, "expert" if experts > 1 else "mlp")
    if role not in inventory.ROLES:
        raise ValueError(f"{where}: {unknown('role', role, inventory.ROLES)}")
    default = 1 if role in inventory.EXCLUDED else max(blocks, 1)
    count = reading.whole(row, "count", where, default * experts)
    if count % experts:
        raise ValueError(f"{where}: {experts} experts in each block do not make up the {count} matrices")
    cut = row.get("cut", "none")
    if cut not in CUTS:
        raise ValueError(f"{where}: {unknown('cut', cut, CUTS)}")
    return Layer(
        reading.text(row, "name", where),
        role,
        (shape[0], shape[1]),
        tuple(range(count // experts)),
        experts,
        CUTS[cut],
        reading.text(row, "joins", where, ""),
        reading.whole(row, "head", where, 1),
    )


def _active(rows: Iterable[reading.Table], layers: Iterable[Layer], where: str) -> float | None:
    """Return the parameters of one token's way, or None if the list does not say through how many experts it goes."""
    total, told = 0.0, False
    for index, (row, layer) in enumerate(zip(rows, layers, strict=True), 1):
        if layer.per_block == 1:
            total += layer.parameters
            continue
        experts = reading.whole(row, "active", f"{where}: layer {index}", layer.per_block)
        if experts > layer.per_block:
            raise ValueError(f"{where}: layer {index}: 'active' is {experts}, of {layer.per_block} experts")
        told = told or "active" in row
        total += layer.parameters * experts / layer.per_block
    return total if told else None


class _Array(NamedTuple):
    """An array of a file: its name without numbers, the block in which it stands, and its shape."""

    stem: str
    block: int | None
    shape: tuple[int, ...]


def _stored(path: Path) -> Model:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"the folder {path} holds no .safetensors file")
    arrays = {name: shape for file in files for name, shape in header(file).items()}
    found: dict[tuple[str, tuple[int, ...]], list[_Array]] = {}
    vectors, notes = 0, list[str]()
    for name, shape in arrays.items():
        array, entries = _placed(name, shape), prod(shape)
        if len(shape) in (2, 3) and entries:
            found.setdefault((array.stem, shape), []).append(array)
        else:
            vectors += entries
            if len(shape) > 3:
                notes.append(f"{name!r} of shape {shape} is no matrix and counts as a vector")
    if not found:
        raise ValueError(f"{path} holds no matrix, only arrays of other shapes")
    turned, told = _turned(found)
    notes += told
    blocks = 1 + max((array.block or 0 for group in found.values() for array in group), default=0)
    layers = tuple(_grouped(stem, group, blocks, stem in turned) for (stem, _), group in found.items())
    notes += _uncounted(layers)
    notes += [
        f"{layer.name!r} is of an unknown kind: no parallelism cuts it" for layer in layers if layer.role == "other"
    ]
    return Model(path.stem, layers, blocks, vectors, (str(path),), notes=tuple(notes))


def header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a safetensors file: eight bytes of length, then JSON, and nothing after is read.

    Raises
    ------
    ValueError
        If there is no such file, or its beginning is not such a header.
    """
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(
            f"there is no file {str(path)!r}" + (f", did you mean {nearest(path.name, beside)!r}?" if beside else "")
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} of its {size} bytes")
        try:
            content = json.loads(file.read(length))
            shapes = {name: entry["shape"] for name, entry in content.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error})") from error
    for name, shape in shapes.items():
        if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError(f"{path} is no safetensors file: the shape of {name!r} is {shape!r}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _placed(name: str, shape: tuple[int, ...]) -> _Array:
    """Take a name apart."""
    plain = re.sub(r"\.(weight|kernel|data)$", "", name)
    plain = re.sub(r"experts\.\d+(?=\.)", "experts", plain)
    block = re.search(r"(?:^|\.)(\d+)(?=\.)", plain)
    stem = re.sub(r"(^|\.)\d+(?=\.)", "", plain).lstrip(".")
    stem = re.sub(r"^(model|transformer|module|language_model|gpt_neox)\.", "", stem)
    stem = re.sub(r"^(layers|h|blocks)\.", "", stem)
    return _Array(stem, int(block.group(1)) if block else None, shape)


def _turned(found: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[set[str], list[str]]:
    """Return the names of matrices that are stored as inputs × outputs, and notes that say so.

    GPT-2's attention and first layers have more outputs than inputs, so that what is wider than tall is stored so.
    Of experts in one array, gate and up-projection have the inputs that the down-projection has as outputs.
    """
    shapes = dict(list(found))
    wide = any(re.search(r"(c_attn|c_fc)$", stem) and shape[-1] > shape[-2] for stem, shape in shapes.items())
    turned = {stem for stem in shapes if wide and re.search(CONV1D, stem)}
    for stem, shape in shapes.items():
        down = re.sub(r"gate_up_proj$", "down_proj", stem)
        if len(shape) == 3 and down != stem and shapes.get(down, (0,))[-1] == shape[-2]:
            turned |= {stem, down}
    names = ", ".join(repr(stem) for stem in shapes if stem in turned)
    return turned, [f"{names} are stored as inputs × outputs, and turned here"] if turned else []


def _grouped(stem: str, group: Iterable[_Array], blocks: int, turned: bool) -> Layer:
    arrays = list(group)
    role, cut = _kind(stem)
    outside = blocks - 1 if role == "head" else 0
    places = [outside if array.block is None else array.block for array in arrays]
    stacked = arrays[0].shape[0] if len(arrays[0].shape) == 3 else 1
    here = tuple(sorted(set(places)))
    if len(places) % len(here):  # not as many in every block
        here = tuple(sorted(places))
    m, n = reversed(arrays[0].shape[-2:]) if turned else arrays[0].shape[-2:]
    group_of = next((name for pattern, name in JOINED if re.search(pattern, stem)), "")
    joins = f"{stem.rpartition('.')[0]}.{group_of}".lstrip(".") if group_of else ""
    return Layer(stem, role, (m, n), here, stacked * len(places) // len(here), cut, joins)


def _kind(stem: str) -> tuple[str, int | None]:
    """Return role and cut of a matrix by its name."""
    place = "mlp"
    for pattern, role in (
        (r"shared_expert", "shared"),
        (r"experts", "expert"),
        (r"attn|attention", "attention"),
    ):
        if re.search(pattern, stem):
            place = role
            break
    for pattern, role, cut in KINDS:
        if re.search(pattern, stem):
            return role or place, cut
    return ("expert", None) if place == "expert" else ("other", None)
