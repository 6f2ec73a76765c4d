"""The name a user most likely meant."""

import pytest

from muon_lab.arithmetic import formats
from muon_lab.nearest import nearest, unknown


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("e4m3", "fp8_e4m3"),
        ("fp8", "fp8_e4m3"),
        ("FP8", "fp8_e4m3"),
        ("mxfp8", "mxfp8_e4m3"),
        ("nvfp", "nvfp4"),
        ("mxfp8-e4m3", "mxfp8_e4m3"),
        ("MXFP8_E4M3", "mxfp8_e4m3"),
        ("fp8e5m2", "fp8_e5m2"),
        ("bf61", "bf16"),
    ],
)
def test_a_part_of_a_name_means_the_first_that_contains_it_and_a_slip_the_most_similar(wanted, meant):
    assert nearest(wanted, formats.known()) == meant


def test_the_order_of_known_names_decides_among_those_that_contain_the_text():
    assert nearest("cub", ("cubic5", "cubic")) == "cubic5"
    assert nearest("cub", ("quintic", "cubic", "cubic5")) == "cubic"


def test_names_keep_their_spelling_and_the_first_of_two_spellings_is_shown():
    assert nearest("lion", ("Lion", "LION")) == "Lion"
    assert nearest("loin", ("Lion", "LION")) == "Lion"


@pytest.mark.parametrize("wanted", ["", None, 3, []])
def test_whatever_is_wanted_there_is_an_answer(wanted):
    assert nearest(wanted, ("quintic", "simple")) in ("quintic", "simple")
    assert nearest(wanted, ()) == ""


def test_the_error_names_what_was_given_what_was_meant_and_what_exists():
    error = unknown("format", "fp8", ("fp64", "fp8_e4m3"))
    assert isinstance(error, ValueError)
    assert str(error) == "unknown format 'fp8': did you mean 'fp8_e4m3'? Known: fp64, fp8_e4m3"
