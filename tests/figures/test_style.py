import matplotlib
import pytest
from matplotlib.figure import Figure

from muon_lab.figures import style


def axes():
    return Figure().subplots()


def labels(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


def test_every_method_has_a_colour_of_its_own():
    assert len(set(style.METHODS.values())) == len(style.METHODS)
    assert not set(style.METHODS.values()) & {style.colour(f"unknown_{index}") for index in range(100)}


def test_every_format_has_a_marker_of_its_own():
    assert len({*style.MARKERS.values(), style.marker("unknown")}) == len(style.MARKERS) + 1


def test_every_number_format_has_a_colour_of_its_own():
    assert len(set(style.FORMATS.values())) == len(style.FORMATS)
    assert not set(style.FORMATS.values()) & {style.format_colour(f"unknown_{index}") for index in range(100)}


def test_all_formats_of_the_stability_study_have_a_colour():
    from muon_lab.studies.stability import Axes

    assert set(Axes().format) <= set(style.FORMATS)


def test_all_published_schedules_have_a_colour():
    from muon_lab.studies import methods

    assert set(methods.known()) <= set(style.METHODS)


def test_house_leaves_no_trace_and_overrides_the_user():
    with matplotlib.rc_context({"font.size": 30.0, "lines.linewidth": 9.0, "axes.facecolor": "red"}):
        with style.house():
            assert matplotlib.rcParams["font.size"] == style.HOUSE["font.size"]
            assert matplotlib.rcParams["axes.facecolor"] == "white"
        assert matplotlib.rcParams["font.size"] == 30.0


@pytest.mark.parametrize("family", [style.HOUSE["font.family"]])
def test_the_font_ships_with_matplotlib(family):
    from matplotlib import font_manager

    assert font_manager.findfont(family, fallback_to_default=False).startswith(matplotlib.get_data_path())


def test_binary_ticks_are_plain_numbers():
    one = axes()
    one.plot([1, 8], [1, 1])
    style.log2(one, "x", [8, 1, 2, 4, 4])
    assert labels(one.xaxis) == ["1", "2", "4", "8"]
    assert list(one.xaxis.get_minorticklocs()) == []


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1e-4, 2.0, ["$10^{-4}$", "$10^{-3}$", "$10^{-2}$", "$10^{-1}$", "1"]),
        (1e-16, 1.0, ["$10^{-15}$", "$10^{-12}$", "$10^{-9}$", "$10^{-6}$", "$10^{-3}$", "1"]),
        (0.2, 0.9, ["0.2", "0.5"]),
        (3.0, 7.0, ["5"]),
    ],
)
def test_decimal_ticks_lie_inside_and_are_few(low, high, wanted):
    one = axes()
    style.log10(one, "y", low, high)
    assert labels(one.yaxis) == wanted
    assert one.get_ylim() == (low, high)
