"""Every kind of file gives the same matrices, and what cannot be measured is refused by name."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from muon_lab.problems import loaded


def matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.up": torch.randn(6, 4, generator=generator),
        "blocks.0.down": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "blocks.1.up": torch.randn(6, 4, generator=generator).half(),
        "norm": torch.ones(4),
    }


def write(path, tensors):
    """Keep tensors in the way that the file's extension says."""
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        torch.save(tensors, path)
    return path


@pytest.fixture(params=[".safetensors", ".npz", ".pt", ".pth", ".bin", ".ckpt", ".PT"])
def file(request, tmp_path):
    return write(tmp_path / f"layers{request.param}", matrices())


def test_every_kind_of_file_gives_the_same_catalogue(file):
    listed = loaded.catalogue(file)
    assert {*listed.entries} == {
        loaded.Entry("blocks.0.up", 6, 4, "float32"),
        loaded.Entry("blocks.0.down", 4, 6, "float64"),
        loaded.Entry("blocks.1.up", 6, 4, "float16"),
    }
    assert listed.notes == ("'norm' was left out: its shape is (4,), a matrix has two dimensions",)
    assert listed.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_every_kind_of_file_gives_the_same_matrices(file):
    expected = {name: tensor for name, tensor in matrices().items() if tensor.ndim == 2}
    read, notes = loaded.load(file)
    assert len(notes) == 1
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        for given in (read[name], loaded.matrix(file, name), loaded.matrix(str(file), name)):
            assert given.dtype == tensor.dtype
            assert torch.equal(given, tensor)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_bfloat16_is_kept(tmp_path, suffix):
    tensor = matrices()["blocks.0.up"].bfloat16()
    file = write(tmp_path / f"layers{suffix}", {"up": tensor})
    assert loaded.catalogue(file).entries == (loaded.Entry("up", 6, 4, "bfloat16"),)
    assert torch.equal(loaded.matrix(file, "up"), tensor)


def test_a_pattern_selects_by_name(file):
    assert {entry.name for entry in loaded.catalogue(file, "blocks.0.*").entries} == {"blocks.0.up", "blocks.0.down"}
    assert {*loaded.load(file, "blocks.?.up")[0]} == {"blocks.0.up", "blocks.1.up"}
    assert loaded.catalogue(file, "*up").notes == ()


def test_a_name_with_brackets_selects_itself(tmp_path):
    file = write(tmp_path / "layers.pt", {"a[0]": torch.ones(2, 2), "a0": torch.ones(2, 2)})
    assert [entry.name for entry in loaded.catalogue(file, "a[0]").entries] == ["a[0]", "a0"]
    assert torch.equal(loaded.matrix(file, "a[0]"), torch.ones(2, 2))


def test_the_state_of_an_optimizer_is_flattened_to_dotted_names(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.full((3, 2), 2.0)
    optimizer.step()
    model = {"layers": [weight, {"bias": torch.zeros(2)}], "step": 7, "name": "run"}
    file = tmp_path / "checkpoint.ckpt"
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
    listed = loaded.catalogue(file)
    assert [entry.name for entry in listed.entries] == ["model.layers.0", "optimizer.state.0.momentum_buffer"]
    assert "'model.layers.1.bias'" in listed.notes[0]
    assert torch.equal(loaded.matrix(file, "optimizer.state.0.momentum_buffer"), weight.grad)
    assert not loaded.matrix(file, "model.layers.0").requires_grad


def test_a_file_of_one_tensor_and_the_old_torch_format_are_read(tmp_path):
    torch.save(torch.ones(2, 3), tmp_path / "one.pt", _use_new_zipfile_serialization=False)
    assert loaded.catalogue(tmp_path / "one.pt").entries == (loaded.Entry("tensor", 2, 3, "float32"),)


def test_a_container_that_contains_itself_ends(tmp_path):
    nested = {"w": torch.ones(2, 2)}
    nested["again"] = nested
    torch.save(nested, tmp_path / "loop.pt")
    assert [entry.name for entry in loaded.catalogue(tmp_path / "loop.pt").entries] == ["w"]


def test_other_byte_orders_and_column_major_arrays_are_the_same_matrix(tmp_path):
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "a.npz", big=expected.astype(">f4"), columns=np.asfortranarray(expected))
    read, _ = loaded.load(tmp_path / "a.npz")
    assert torch.equal(read["big"], torch.from_numpy(expected))
    assert torch.equal(read["columns"], torch.from_numpy(expected))


def test_empty_matrices_are_matrices(tmp_path):
    for suffix in (".safetensors", ".npz", ".pt"):
        file = write(tmp_path / f"empty{suffix}", {"empty": torch.zeros(0, 3)})
        assert loaded.catalogue(file).entries == (loaded.Entry("empty", 0, 3, "float32"),)


def test_listing_needs_no_torch(tmp_path):
    files = [write(tmp_path / f"layers{suffix}", matrices()) for suffix in (".safetensors", ".npz")]
    script = (
        "import sys; from muon_lab.problems import loaded\n"
        "for path in sys.argv[1:]: assert len(loaded.catalogue(path).entries) == 3\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_matrix_of_other_numbers_is_refused_unless_a_pattern_leaves_it_out(tmp_path, suffix, dtype):
    file = write(tmp_path / f"layers{suffix}", {"w": torch.ones(2, 2), "index": torch.ones(2, 2, dtype=dtype)})
    name = str(dtype).removeprefix("torch.")
    for read in (loaded.catalogue, loaded.load, lambda path: loaded.matrix(path, "index")):
        with pytest.raises(
            ValueError, match=f"'index' has dtype {name}, a matrix needs one of float64.*a pattern can leave"
        ):
            read(file)
    assert len(loaded.catalogue(file, "w").entries) == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_refused_since_their_scales_are_elsewhere(tmp_path, suffix, dtype):
    file = write(tmp_path / f"layers{suffix}", {"w": torch.ones(2, 2).to(dtype)})
    with pytest.raises(ValueError, match="'w' has dtype float8_e"):
        loaded.catalogue(file)


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        (suffix, dtype)
        for suffix in (".safetensors", ".npz", ".pt")
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        if (suffix, dtype) != (".npz", torch.bfloat16)
    ],
)
def test_every_entry_that_is_not_finite_is_counted(tmp_path, suffix, dtype):
    planted = torch.full((4, 5), torch.finfo(dtype).max, dtype=dtype)
    planted[0, 1], planted[2, 2], planted[3, 4] = torch.nan, torch.inf, -torch.inf
    file = write(tmp_path / f"layers{suffix}", {"good": torch.ones(2, 2), "w": planted})
    for read in (loaded.catalogue, loaded.load, lambda path: loaded.matrix(path, "w")):
        with pytest.raises(ValueError, match="3 of the 20 entries of 'w' are not finite"):
            read(file)
    assert len(loaded.catalogue(file, "good").entries) == 1


def test_a_pattern_that_selects_nothing_names_the_nearest(file):
    with pytest.raises(
        ValueError, match=r"pattern 'blocks.0.upp' selects none of the 4 names, the nearest are 'blocks.0.up'"
    ):
        loaded.catalogue(file, "blocks.0.upp")
    with pytest.raises(ValueError, match=r"no array named 'block.1.up', the nearest are 'blocks.1.up'"):
        loaded.matrix(file, "block.1.up")


def test_a_pattern_that_selects_no_matrix_is_refused(file):
    with pytest.raises(ValueError, match=r"must select a matrix, got only arrays of other shapes: 'norm'"):
        loaded.catalogue(file, "norm")
    with pytest.raises(ValueError, match=r"'norm' must be a matrix, with two dimensions, got the shape \(4,\)"):
        loaded.matrix(file, "norm")


def test_a_missing_file_names_the_nearest(file):
    with pytest.raises(ValueError, match=rf"there is no file .*layer{file.suffix}, the nearest are '{file.name}'"):
        loaded.catalogue(file.with_name(f"layer{file.suffix}"))
    with pytest.raises(ValueError, match="there is no file"):
        loaded.catalogue(file.parent / "nowhere" / "layers.npz")


def test_folders_and_unknown_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"one of .safetensors .npz .pt .pth .bin .ckpt, got .*layers.h5"):
        loaded.catalogue(tmp_path / "layers.h5")
    with pytest.raises(ValueError, match="got the folder"):
        loaded.catalogue(tmp_path)


def one_sentence(error: pytest.ExceptionInfo[ValueError]) -> bool:
    return "\n" not in str(error.value) and ". " not in str(error.value)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused_in_one_sentence(file, kept):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match=r"could not be read|must hold only tensors") as error:
        loaded.catalogue(file)
    assert one_sentence(error)


def test_bytes_of_another_kind_are_refused_in_one_sentence(file):
    file.write_bytes(b"hello world, this is no tensor at all")
    with pytest.raises(ValueError, match=r"could not be read|must hold only tensors") as error:
        loaded.catalogue(file)
    assert one_sentence(error)


def test_a_damaged_array_is_refused_when_it_is_read(tmp_path):
    file = write(tmp_path / "layers.npz", {"w": torch.ones(8, 8)})
    damaged = bytearray(file.read_bytes())
    damaged[300] ^= 1  # inside the numbers: the archive's checksum tells
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"could not be read as .npz: BadZipFile"):
        loaded.catalogue(file)


class Custom:
    """Something that only a pickle that runs code can restore."""


def test_a_pickle_that_would_run_code_is_refused_in_one_sentence(tmp_path):
    for value, given in ((Custom(), "Custom"), (np.ones((2, 2)), "numpy.*_reconstruct")):
        torch.save({"w": torch.ones(2, 2), "more": value}, tmp_path / "unsafe.pt")
        with pytest.raises(
            ValueError, match=f"must hold only tensors, .*would run code when it is read, got .*{given}"
        ) as error:
            loaded.catalogue(tmp_path / "unsafe.pt")
        assert one_sentence(error)
    np.savez(tmp_path / "unsafe.npz", w=np.array([[Custom()]], dtype=object))
    with pytest.raises(ValueError, match=r"could not be read as .npz: ValueError Object arrays cannot be loaded"):
        loaded.catalogue(tmp_path / "unsafe.npz")


def test_a_single_array_under_the_name_of_an_archive_is_refused(tmp_path):
    with (tmp_path / "array.npz").open("wb") as raw:
        np.save(raw, np.ones((2, 2)))
    with pytest.raises(ValueError, match="must be an archive of named arrays"):
        loaded.catalogue(tmp_path / "array.npz")


def test_tensors_without_plain_data_are_refused(tmp_path):
    torch.save({"w": torch.ones(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(ValueError, match=r"'w' must be a dense tensor with data, got layout torch.sparse_coo on cpu"):
        loaded.catalogue(tmp_path / "sparse.pt")


def test_two_tensors_with_one_name_are_refused(tmp_path):
    torch.save({"a.b": torch.ones(2, 2), "a": {"b": torch.zeros(2, 2)}}, tmp_path / "twice.pt")
    with pytest.raises(ValueError, match=r"a name of its own, got 'a.b' twice"):
        loaded.catalogue(tmp_path / "twice.pt")
