"""Who keeps whom waiting: judged against a simulation that runs every program as far as it goes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.parallel.journal import Board, Group, Journal, Standing, Wait, standstill, uneven, waiting

RANKS = 4
GROUPS = [Group(ranks, 0) for ranks in ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3))]


class Simulation:
    """Ranks that make blocking calls one after the other."""

    def __init__(self, programs):
        self.programs = programs
        self.issued = [dict.fromkeys((group for group in GROUPS if rank in group.ranks), 0) for rank in range(RANKS)]
        self.at = [0] * RANKS
        self.waits = [None] * RANKS

    def may_go_on(self, rank):
        wait = self.waits[rank]
        if wait is None:
            return self.at[rank] < len(self.programs[rank])
        return all(self.issued[other][wait.group] >= wait.number for other in wait.group.ranks)

    def go_on(self, rank):
        if self.waits[rank] is not None:
            self.waits[rank] = None
            return
        group = self.programs[rank][self.at[rank]]
        self.at[rank] += 1
        self.issued[rank][group] += 1
        self.waits[rank] = Wait(group, self.issued[rank][group], "barrier")

    def standings(self):
        return [
            Standing(dict(self.issued[rank]), self.waits[rank], self.waits[rank] is None and self.finished(rank))
            for rank in range(RANKS)
        ]

    def finished(self, rank):
        return self.at[rank] == len(self.programs[rank])


def programs(draw):
    """Mostly the same calls on all ranks of each group, with a few left out or swapped."""
    calls = [draw.choice(GROUPS) for _ in range(draw.randrange(6))]
    lists = [[group for group in calls if rank in group.ranks] for rank in range(RANKS)]
    for _ in range(draw.randrange(3)):
        rank = draw.randrange(RANKS)
        if lists[rank]:
            draw.choice((lambda mine: mine.pop(draw.randrange(len(mine))), draw.shuffle))(lists[rank])
    return lists


@given(st.integers(0, 10**6))
def test_nobody_is_given_up_who_could_still_go_on_and_in_the_end_all_others_are(seed):
    draw = random.Random(seed)
    simulation, given_up = Simulation(programs(draw)), set()
    while able := [rank for rank in range(RANKS) if simulation.may_go_on(rank)]:
        given_up |= set(standstill(simulation.standings()))
        simulation.go_on(draw.choice(able))
    stuck = {rank for rank in range(RANKS) if simulation.waits[rank] is not None}
    assert given_up <= stuck
    assert set(standstill(simulation.standings())) == stuck


def test_both_ends_of_the_property_occur():
    """Negative control: the random programs do stand still, and do come to an end."""
    ends = set()
    for seed in range(200):
        draw = random.Random(seed)
        simulation = Simulation(programs(draw))
        while able := [rank for rank in range(RANKS) if simulation.may_go_on(rank)]:
            simulation.go_on(draw.choice(able))
        ends.add(any(simulation.waits))
    assert ends == {False, True}


def test_reasons_name_who_is_missing():
    pair, triple = Group((0, 1), 0), Group((0, 1, 2), 0)
    crossed = [
        Standing({pair: 1, triple: 0}, Wait(pair, 1, "all_reduce")),
        Standing({pair: 0, triple: 1}, Wait(triple, 1, "broadcast")),
        Standing({triple: 1}, Wait(triple, 1, "broadcast")),
    ]
    reasons = standstill(crossed)
    assert set(reasons) == {0, 1, 2}
    assert reasons[0] == "rank 0 waits in all_reduce (call 1 of ranks 0, 1) for rank 1"
    assert reasons[2] == "rank 2 waits in broadcast (call 1 of ranks 0, 1, 2) for rank 0"
    crossed[0] = Standing({pair: 1, triple: 0})
    assert standstill(crossed) == {}
    assert waiting(0, crossed[0]) == "rank 0 computes"


def test_unequal_numbers_of_calls_are_named():
    pair = Group((1, 2), 0)
    equal = [Standing({}, returned=True)] + [Standing({pair: 2}, returned=True)] * 2
    assert uneven(equal) == ""
    assert "rank 2 made 3 calls" in uneven([*equal[:2], Standing({pair: 3}, returned=True)])


def test_a_board_shows_what_the_journals_hold(tmp_path):
    """Written by one mapping of the file, read by another, as between processes."""
    writer = Board(tmp_path / "board", 3)
    reader = Board(tmp_path / "board", 3)
    journals = [Journal(rank, writer) for rank in range(3)]
    for journal in journals:
        world = journal.opened((0, 1, 2))
        journal.issued(world, "all_gather_v")
        if journal.rank:
            pair = journal.opened((1, 2))
            assert journal.opened((1, 2)) == Group((1, 2), 1)
            number = journal.issued(pair, "all_reduce")
            with journal.waiting(pair, number, "all_reduce"):
                assert reader.standing(journal.rank, False) == journal.standing()
                assert journal.standing().wait == Wait(pair, 1, "all_reduce")
        assert reader.standing(journal.rank, False) == journal.standing()
        assert reader.standing(journal.rank, True).returned
    Journal(1, writer)
    assert reader.standing(1, False) == Standing({})


def test_a_board_that_is_full_shows_what_fits(tmp_path):
    board = Board(tmp_path / "board", 1)
    journal = Journal(0, board)
    groups = [journal.opened((0,)) for _ in range(200)]
    for group in groups:
        journal.issued(group, "barrier")
    with journal.waiting(groups[-1], 1, "barrier"):
        seen = board.standing(0, False)
    assert len(seen.issued) == 128
    assert seen.wait is None
    assert set(seen.issued.values()) == {1}


@pytest.mark.parametrize("verb", ["all_reduce", "something new"])
def test_verbs_are_named_on_a_board_where_they_are_known(verb, tmp_path):
    board = Board(tmp_path / "board", 1)
    journal = Journal(0, board)
    with journal.waiting(journal.opened((0,)), 1, verb):
        assert board.standing(0, False).wait.verb == (verb if verb == "all_reduce" else "a call")
