"""What emulates a format has the same bits where its caller is compiled."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from muon_lab.arithmetic import Rounded, TensorCore, microscaling, policy, rounding
from muon_lab.arithmetic.formats import get
from muon_lab.compiling import as_written

FORMATS = ("bf16", "mxfp8_e4m3")


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def graphs():
    """Return what compiles a function, and counts the graphs that it runs."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    yield lambda function: torch.compile(function, backend=counter), counter
    torch.compiler.reset()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: microscaling.roundtrip(x, "mxfp8_e4m3"),
        lambda x: microscaling.quantize(x, "nvfp4").dequantize(),
        lambda x: rounding.decode(rounding.encode(x, get("fp8_e5m2")), get("fp8_e5m2")),
        lambda x: policy.unit(x, x.double().norm(dim=(-2, -1), keepdim=True)),
        lambda x: Rounded("bf16").gram(x),
        lambda x: Rounded("mxfp8_e4m3").matmul(x, x.mT, alpha=2.0),
        lambda x: Rounded("fp8_e4m3", accumulator=TensorCore(13)).gram(x),
    ],
)
def test_no_operation_of_an_emulation_is_in_a_graph(graphs, function):
    compiled, counter = graphs
    x = numbers(32, 64)
    assert torch.equal(compiled(function)(x), function(x))
    assert counter.op_count <= 3, "only the argument and what the caller does itself may be compiled"


def test_a_function_that_is_not_written_so_is_compiled(graphs):
    """Negative control: the counter sees it, and a decorated one is called with what it was given."""
    compiled, counter = graphs
    assert torch.equal(compiled(lambda x: 2 * x + 1)(torch.ones(2)), torch.full((2,), 3.0))
    assert counter.op_count == 2
    assert as_written(lambda x, *, by: x * by)(3, by=4) == 12


COMPILED = """
import sys
import torch
from muon_lab import polar
from muon_lab.arithmetic import Rounded

G = torch.randn((2, 48, 96), generator=torch.Generator().manual_seed(3))
for name in sys.argv[1:]:
    f = polar.newton_schulz(polar.schedules.get("quintic", 3), Rounded(name))
    print(name, torch.equal(torch.compile(f)(G), f(G)), flush=True)
f = polar.newton_schulz(polar.schedules.get("quintic", 3))
print("exact", bool((torch.compile(f)(G) - f(G)).abs().max() < 1e-5))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_compiled_for_this_processor_an_emulation_has_the_same_bits(tmp_path):
    """In a process of its own, which takes the compiler's own processes with it."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILED, *FORMATS], env=environment, capture_output=True, text=True, timeout=280
    )
    assert answer.stdout.split("\n")[:-1] == [f"{name} True" for name in (*FORMATS, "exact")], answer.stderr[-2000:]
