"""Orders over a real store, and a node that comes while they are given."""

from __future__ import annotations

import threading

from test_store import opened

from paceline.exchange.crew import Crew


def test_a_node_that_comes_later_hears_the_next_order_and_none_before() -> None:
    with opened() as (first, other):
        leads, comes = Crew(first, 0, ["a", "b"]), Crew(other, 2, ["a", "b", "c"])
        leads.order("go", [1, 2])
        assert not leads.has_arrivals()
        heard: list[object] = []

        def come() -> None:
            comes.arrive({"speed": 3.0})
            heard.append(comes.next_order()["do"])
            comes.answer(did={})

        thread = threading.Thread(target=come)
        thread.start()
        while not leads.has_arrivals():
            pass
        assert leads.arrivals() == {2: {"speed": 3.0}}
        assert not leads.has_arrivals()
        leads.take_in(2, "c")
        leads.order("leave", [2])
        assert leads.answer_of(2, 20.0) == {"did": {}}
        thread.join()
        assert heard == ["leave"]
        assert leads.hosts == comes.hosts == ["a", "b", "c"]


def test_a_node_that_was_lost_takes_its_place_again() -> None:
    with opened() as (first, other):
        leads, comes = Crew(first, 0, ["a", "b"]), Crew(other, 1, ["a", "b"])
        leads.gone[1] = "host b has gone"
        thread = threading.Thread(target=comes.arrive, args=({"speed": 0.0},))
        thread.start()
        while not (found := leads.arrivals()):
            pass
        assert list(found) == [1]
        leads.take_in(1, "b")
        thread.join()
        assert leads.gone == {}


def test_others_hear_who_is_there_again_and_forget_no_newer_loss() -> None:
    with opened() as (first, other):
        leads, follows = Crew(first, 0, ["a", "b", "c"]), Crew(other, 1, ["a", "b", "c"])
        leads.gone[2] = follows.gone[2] = "host c has gone"
        follows.learn(leads.known_of([0, 1, 2]))
        assert 2 in follows.gone
        leads.take_in(2, "c")
        follows.learn(leads.known_of([0, 1, 2]))
        assert follows.gone == {}
        follows.gone[2] = "host c has gone once more"
        follows.learn(leads.known_of([0, 1, 2]))
        assert 2 in follows.gone
