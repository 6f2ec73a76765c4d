"""The user's own model: a list of layers in TOML, the header of safetensors files, or a Hugging Face configuration.

Of safetensors only the headers are read. Names tell what a matrix is for, as Megatron-LM and Hugging Face call them:
``q_proj``, ``gate_proj`` and their like are cut along their rows by tensor parallelism, ``o_proj`` and ``down_proj``
along their columns; a name that says nothing is kept whole. What could not be placed is in the notes of the model.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from muon_lab.cost import architecture, inventory, reading
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


def read(name: str, *, qkv: str = "stored", gate_up: str = "stored") -> Model:
    """Return a model by name, or that of a file.

    Parameters
    ----------
    name : str
        One of `inventory.names`, or the path of a ``.toml`` list, of a ``.safetensors`` file, of a folder of such
        files, or of a ``config.json``.
    qkv, gate_up : {"stored", "split", "fused"}
        As for `inventory.get`.

    Raises
    ------
    ValueError
        If there is no such model or file, or it cannot be understood; one sentence.

    Examples
    --------
    >>> read("gpt2").count
    48
    """
    path = Path(name or "?")
    if name in inventory.names():
        return inventory.get(name, qkv=qkv, gate_up=gate_up)
    if path.is_dir():
        return _stored(path)
    if path.suffix == ".toml":
        return variant(_listed(path), qkv=qkv, gate_up=gate_up)
    if path.suffix == ".json":
        return _configured(path, qkv, gate_up)
    if path.suffix == ".safetensors":
        return _stored(path)
    raise ValueError(
        f"{unknown('model', name, inventory.names())}; or give a .toml list, a .safetensors file or a config.json"
    )


def _uncounted(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return a note if there are experts: nothing said how many of them a token passes."""
    if not any(layer.expert and layer.per_block > 1 for layer in layers):
        return ()
    return ("how many experts a token passes is unknown, so a step is estimated as if it passed all of them",)


def _configured(path: Path, qkv: str, gate_up: str) -> Model:
    config = reading.json_object(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    known = architecture.normalised(config, str(path))
    model = architecture.model(config, name or path.stem)
    model = model if model.active else replace(model, notes=_uncounted(model.layers))
    return variant(model, qkv=qkv, gate_up=gate_up, fused=bool(known.get("fused_qkv")))


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
    blocks = 1 + max((array.block or 0 for group in found.values() for array in group), default=0)
    layers = tuple(_grouped(stem, group, blocks) for (stem, _), group in found.items())
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


def _grouped(stem: str, group: Iterable[_Array], blocks: int) -> Layer:
    arrays = list(group)
    role, cut = _kind(stem)
    outside = blocks - 1 if role == "head" else 0
    places = [outside if array.block is None else array.block for array in arrays]
    stacked = arrays[0].shape[0] if len(arrays[0].shape) == 3 else 1
    here = tuple(sorted(set(places)))
    if len(places) % len(here):  # not as many in every block
        here = tuple(sorted(places))
    m, n = arrays[0].shape[-2:]
    return Layer(stem, role, (m, n), here, stacked * len(places) // len(here), cut)


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
