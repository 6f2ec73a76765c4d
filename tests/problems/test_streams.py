"""Recordings are reproducible, the committed stream is what its command makes, and reading it needs no torch."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from muon_lab.problems import models, streams, text

TINY = streams.Recording(
    models.GPTConfig(width=8, depth=2, heads=2, context=8),
    batch=2,
    steps=(1, 2, 5),
    layers=("blocks.0.*", "*.1.mlp.up"),
    omit=(),
)


@pytest.fixture(scope="module")
def tiny() -> streams.Stream:
    return streams.recorded(TINY, cache=None)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_a_recording_has_every_kind_step_and_layer_that_was_asked_for(tiny):
    layers = ["attention.out", "attention.qkv", "mlp.down", "mlp.up"]
    layers = [*(f"blocks.0.{layer}" for layer in layers), "blocks.1.mlp.up"]
    names = [f"{kind}/{step}/{layer}" for kind in streams.KINDS for step in (1, 2, 5) for layer in layers]
    assert [entry.name for entry in tiny] == names
    assert len(tiny) == len(names)
    for entry in tiny:
        assert entry.name == f"{entry.kind}/{entry.step}/{entry.layer}"
        assert entry.name in tiny
        assert tiny[entry.name].shape == (entry.rows, entry.cols)
        assert tiny[entry.name].dtype == torch.float32


def test_the_gradient_of_the_first_step_is_that_of_the_seeded_model_on_the_first_batch(tiny):
    generator = torch.Generator().manual_seed(TINY.seed)
    model = models.GPT(TINY.model, generator)
    model.loss(*next(text.batches(text.corpus().train, TINY.batch, TINY.model.context, generator))).backward()
    for entry in tiny.select("gradient/1/*"):
        assert torch.equal(tiny[entry.name], models.matrices(model)[f"{entry.layer}.weight"].grad)


def test_momentum_is_the_moving_average_of_the_gradients():
    every = streams.recorded(replace(TINY, steps=(1, 2, 3, 4), layers=("blocks.0.mlp.up",)), cache=None)
    average = torch.zeros(32, 8, dtype=torch.float64)
    for step in range(1, 5):
        average = TINY.beta * average + (1 - TINY.beta) * every[f"gradient/{step}/blocks.0.mlp.up"].double()
        momentum = every[f"momentum/{step}/blocks.0.mlp.up"].double()
        # each of the steps rounds a product and a sum, and beta itself
        assert (momentum - average).norm() <= 3 * step * torch.finfo(torch.float32).eps * average.norm()
        plain = every[f"gradient/{step}/blocks.0.mlp.up"].double()
        assert (momentum - plain).norm() > 0.5 * plain.norm()  # the comparison above can tell


def test_what_is_recorded_does_not_change_the_training(tiny):
    less = streams.recorded(replace(TINY, steps=(5,), kinds=("gradient",), layers=("*.up",)), cache=None)
    assert {entry.name for entry in less} == {f"gradient/5/blocks.{i}.mlp.up" for i in (0, 1)}
    assert all(torch.equal(less[entry.name], tiny[entry.name]) for entry in less)


def test_omitted_entries_are_left_out():
    stream = streams.recorded(replace(TINY, omit=("gradient/[12]/*", "*.down")), cache=None)
    assert {(entry.kind, entry.step) for entry in stream} == {("gradient", 5), *(("momentum", i) for i in (1, 2, 5))}
    assert not any(entry.layer.endswith("down") for entry in stream)


def test_the_learning_rate_and_the_seed_change_what_is_recorded(tiny):
    for other in (replace(TINY, lr=1e-3), replace(TINY, seed=1)):
        name = "gradient/5/blocks.0.mlp.up"
        assert not torch.equal(streams.recorded(other, cache=None)[name], tiny[name])


def test_provenance_says_how_to_make_the_stream_again(tiny):
    found = tiny.provenance
    assert found["recording"] == json.loads(TINY.canonical())
    assert found["command"] == streams.command(TINY)
    assert found["text_sha256"] == text.corpus().sha256
    assert found["torch"] == torch.__version__
    assert found["losses"].keys() == {"1", "2", "5"}
    assert "/" not in found["command"].replace("blocks.0.*", "")  # no paths


def test_equal_recordings_give_equal_bytes(tiny):
    assert streams.recorded(replace(TINY), cache=None).content == tiny.content


def test_the_cache_is_read_when_it_has_the_recording(tmp_path, tiny, monkeypatch):
    assert streams.recorded(TINY, cache=tmp_path / "new" / "folder") == tiny
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [f"{streams.key(TINY)}.safetensors"]
    monkeypatch.setattr(streams, "_record", None)  # training again would fail
    assert streams.recorded(TINY, cache=tmp_path / "new" / "folder").sha256 == tiny.sha256


def test_the_default_cache_is_in_the_users_cache_folder(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert streams.recorded(TINY) == tiny
    assert (tmp_path / "muon_lab" / "streams" / f"{streams.key(TINY)}.safetensors").read_bytes() == tiny.content
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert streams.cache_folder() == tmp_path / ".cache" / "muon_lab" / "streams"


def test_without_a_cache_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    streams.recorded(TINY, cache=None)
    assert not [*tmp_path.iterdir()]


def test_every_setting_is_in_the_key(monkeypatch):
    others = [
        replace(TINY, model=replace(TINY.model, depth=3)),
        *(replace(TINY, **{name: 0.5}) for name in ("lr", "weight_decay", "beta")),
        replace(TINY, betas=(0.5, 0.5)),
        *(replace(TINY, **{name: 3}) for name in ("batch", "seed")),
        replace(TINY, steps=(1, 2)),
        replace(TINY, kinds=("momentum",)),
        *(replace(TINY, **{name: ("*.up",)}) for name in ("layers", "omit")),
    ]
    keys = {streams.key(recording) for recording in (TINY, *others)}
    monkeypatch.setattr(streams, "RECORDER", streams.RECORDER + 1)
    assert len(keys | {streams.key(TINY)}) == len(others) + 2


def test_a_file_that_cannot_be_finished_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(source, target):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="no space left"):
        streams.recorded(TINY, cache=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_committed_stream_is_the_default_recording():
    stream = streams.committed()
    default = streams.Recording()
    assert stream.provenance["recording"] == json.loads(default.canonical())
    assert stream.provenance["command"] == streams.command(default) == "python -m muon_lab.problems.streams --out FILE"
    assert len(stream.content) <= 3_000_000
    assert {(entry.kind, entry.step) for entry in stream} == {("gradient", 200), ("momentum", 20), ("momentum", 200)}
    d = default.model.width
    shapes = {"attention.qkv": (3 * d, d), "attention.out": (d, d), "mlp.up": (4 * d, d), "mlp.down": (d, 4 * d)}
    for step in ("gradient/200", "momentum/20", "momentum/200"):
        found = {entry.layer: (entry.rows, entry.cols) for entry in stream.select(f"{step}/*")}
        assert found == {f"blocks.{i}.{layer}": shape for i in (0, 3) for layer, shape in shapes.items()}


def test_the_committed_matrices_are_plausible():
    stream = streams.committed()
    assert stream.provenance["losses"]["200"] < 2.5 < stream.provenance["losses"]["20"] < 5.5
    for entry in stream:
        matrix = stream[entry.name]
        assert matrix.isfinite().all()
        assert 1e-4 < matrix.norm() < 10  # neither vanished nor exploded
        s = torch.linalg.svdvals(matrix.double())
        assert s[0] / s[len(s) // 2] > 5  # as gradients are: a few large directions above a broad tail
    for entry in stream.select("gradient/200/*"):
        gradient, momentum = stream[entry.name], stream[f"momentum/200/{entry.layer}"]
        cosine = (gradient * momentum).sum() / gradient.norm() / momentum.norm()
        assert 0 < cosine < 0.9  # the average contains this gradient, and much else
        assert momentum.norm() < gradient.norm()


@pytest.mark.slow
def test_the_command_makes_the_committed_stream_again(tmp_path):
    committed = streams.committed()
    if committed.provenance["text_sha256"] != text.corpus().sha256:
        pytest.skip("this Python's documentation differs from that of the committed recording")
    out = tmp_path / "again.safetensors"
    done = python("-m", "muon_lab.problems.streams", "--out", str(out), "--steps", "20", "--omit", "gradient/*")
    assert done.returncode == 0, done.stderr
    again = streams.Stream(out.read_bytes())
    assert [entry.name for entry in again] == [entry.name for entry in committed.select("momentum/20/*")]
    for entry in again:
        here, there = again[entry.name], committed[entry.name]
        cosine = (here * there).sum() / here.norm() / there.norm()
        assert cosine > 0.99, entry.name  # the same bits on one machine; elsewhere training amplifies rounding


@pytest.mark.slow
def test_the_command_writes_the_same_bytes_twice(tmp_path):
    outs = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for out in outs:
        done = python("-m", "muon_lab.problems.streams", "--out", str(out), *shlex.split(streams.command(TINY))[5:])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # progress is for terminals
        assert streams.Stream(out.read_bytes()).sha256 in done.stdout
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert streams.Stream(outs[0].read_bytes()).provenance["recording"] == json.loads(TINY.canonical())
    assert sorted(tmp_path.iterdir()) == outs


def test_the_command_of_a_recording_parses_back_to_it():
    for recording in (
        TINY,
        streams.Recording(),
        replace(TINY, lr=1e-7, betas=(0.5, 0.75), kinds=("momentum",), seed=3),
    ):
        words = shlex.split(streams.command(recording))[3:]
        given = vars(streams._parser().parse_args(words))
        assert str(given.pop("out")) == "FILE"
        assert streams._recording(given) == recording


def test_bad_arguments_end_with_status_two_and_one_sentence(tmp_path, capsys):
    assert streams.main(["--out", str(tmp_path / "nowhere" / "a.safetensors")]) == 2
    assert "must lie in an existing folder" in capsys.readouterr().err
    assert streams.main(["--out", str(tmp_path / "a.safetensors"), "--steps", "5", "2"]) == 2
    assert capsys.readouterr().err == "streams: Recording: steps must be increasing integers from 1, got (5, 2)\n"
    with pytest.raises(SystemExit, match="2"):
        streams.main([])
    assert not [*tmp_path.iterdir()]


def test_listing_the_committed_stream_and_help_need_no_torch():
    listing = (
        "import sys; from muon_lab.problems import streams\n"
        "stream = streams.committed(); assert len(stream.select('*.qkv')) == 6; stream.sha256; repr(stream)\n"
        "stream.provenance; assert 'torch' not in sys.modules"
    )
    done = python("-c", listing)
    assert done.returncode == 0, done.stderr
    help_text = (
        "import sys; from muon_lab.problems import streams\ntry: streams.main(['--help'])\nexcept SystemExit: pass\n"
    )
    done = python("-c", help_text + "assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert "default: 20 200" in done.stdout


def test_a_matrix_is_a_fresh_copy(tiny):
    name = "gradient/1/blocks.0.mlp.up"
    before = tiny[name].clone()
    tiny[name].zero_()
    assert torch.equal(tiny[name], before)


def test_the_printed_stream_is_a_table(tiny):
    lines = repr(tiny).splitlines()
    assert lines[0] == f"Stream of {len(tiny)} matrices, SHA-256 {tiny.sha256}"
    assert [line.split() for line in lines[1:]] == [[e.name, str(e.rows), "×", str(e.cols)] for e in tiny]


def test_entries_are_in_natural_order():
    config = models.GPTConfig(width=4, depth=11, heads=1, context=4)
    stream = streams.recorded(
        streams.Recording(config, batch=1, steps=(2, 10), kinds=("momentum",), layers=("*.out",), omit=()), cache=None
    )
    expected = [(step, f"blocks.{i}.attention.out") for step in (2, 10) for i in range(11)]
    assert [(entry.step, entry.layer) for entry in stream] == expected


def test_a_name_or_pattern_that_is_not_there_names_the_nearest(tiny):
    with pytest.raises(
        ValueError, match=r"no matrix named 'gradient/1/blocks.0.mlp.upp', the nearest are 'gradient/1/b"
    ):
        tiny["gradient/1/blocks.0.mlp.upp"]
    with pytest.raises(ValueError, match=r"pattern 'gradients/5/\*' selects none of the 30 names, the nearest are"):
        tiny.select("gradients/5/*")
    assert "gradient/1/head" not in tiny


def test_bytes_that_are_no_stream_are_refused(tiny, tmp_path):
    from safetensors.torch import save

    for content in (b"", b"hello world, this is no stream", tiny.content[:100]):
        with pytest.raises(ValueError, match="must begin with its header"):
            streams.Stream(content)
    with pytest.raises(ValueError, match=r"must be a whole float32 matrix"):
        streams.Stream(tiny.content[:-1])
    for name, tensor in (
        ("w", torch.ones(2, 2)),
        ("gradient/1/w", torch.ones(2)),
        ("gradient/1/w", torch.ones(2, 2).half()),
    ):
        with pytest.raises(ValueError, match=f"'{name}' must be a whole float32 matrix named KIND/STEP/LAYER"):
            streams.Stream(save({name: tensor}))
    damaged = tmp_path / f"{streams.key(TINY)}.safetensors"
    damaged.write_bytes(tiny.content[:-1])
    with pytest.raises(ValueError, match="must be a recorded stream, got a damaged file, to be deleted"):
        streams.recorded(TINY, cache=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"weight_decay": -1.0}, "weight_decay must be a number of at least 0"),
        ({"batch": 0}, "batch must be an integer of at least 1"),
        ({"beta": 1.0}, r"beta must be a number in \[0, 1\), got 1.0"),
        ({"steps": ()}, "steps must be increasing integers from 1"),
        ({"steps": (0, 1)}, "steps must be increasing integers from 1"),
        ({"steps": (2, 2)}, "steps must be increasing integers from 1"),
        ({"seed": -1}, "seed must be an integer in"),
        ({"kinds": ("weight",)}, r"kinds must be some of gradient, momentum, got \('weight',\)"),
        ({"kinds": ()}, "kinds must be some of gradient, momentum"),
        ({"layers": ()}, "layers must be at least one pattern"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"Recording: {message}"):
        replace(TINY, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": ("blocks.0.*", "blocks.7.*")}, r"layers: pattern 'blocks.7.\*' selects none of the 8 names"),
        ({"layers": ("head",)}, "layers: pattern 'head' selects none"),
        ({"omit": ("*",)}, "omit must leave something to record"),
        ({"model": models.GPTConfig(width=8, depth=1, heads=2, context=8, vocabulary=100)}, "at least 256.*got 100"),
        ({"lr": 1e30, "steps": (9,)}, "lr must keep the training finite, got 1e"),
    ],
)
def test_recordings_that_cannot_be_made_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        streams.recorded(replace(TINY, **settings), cache=None)
