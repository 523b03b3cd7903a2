"""Nodes that end their training while others still ask them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.exchange.gossip.peers import Neighbours
from paceline.exchange.network import Traffic
from paceline.exchange.wire import Answer, Kind, Request


class Link:
    """Another node that asks, and is answered in the moment in which this one begins to leave."""

    def __init__(self, neighbours: Any) -> None:
        self.neighbours, self.traffic = neighbours, Traffic()
        self.answers: list[Answer] = []

    def asked(self) -> Request:
        return Request(kind=Kind.REPORT)

    def answer(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.neighbours._leaving = True


def test_who_is_not_told_that_an_answer_was_the_last_gets_another() -> None:
    """Over MPI nobody sees a connection close: one that was not told would wait for ever."""
    neighbours: Any = object.__new__(Neighbours)
    neighbours._mixture = SimpleNamespace(clock=3, elements=10)
    neighbours.stops = neighbours.wishes_stop = neighbours._leaving = False
    link: Any = Link(neighbours)
    ended = [neighbours._answer(2, link), neighbours._answer(2, link)]
    assert [bool(answer.length) for answer in link.answers] == ended == [False, True]
