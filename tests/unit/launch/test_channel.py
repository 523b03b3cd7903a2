"""Messages that are not what their kind demands: refused at once, in words, whoever sent them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from attending import attended, wait_for

from paceline.launch.channel import TO_AGENT, connect, read_message
from paceline.launch.control import Lost
from paceline.launch.failures import lost_sentence


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"kind": "beat", "ranks": [{"rank": 0}]}, "an entry of `beat`.ranks.phase is missing"),
        ({"kind": "end", "code": True}, "`end`.code is True, not a whole number"),
        ({"kind": "error", "report": None}, "`error`.report is None, not a table"),
        ({"kind": 5}, "a message.kind is 5, not a text of one line"),
        ([], "a message is [], not a table"),
    ],
)
def test_what_is_wrong_is_named(message: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        read_message(json.dumps(message).encode())


def test_each_end_has_its_own_fields() -> None:
    order = json.dumps({"kind": "measure", "again": False}).encode()
    assert read_message(order, TO_AGENT)["again"] is False
    with pytest.raises(ValueError, match=r"`measure`\.measure is missing"):
        read_message(order)
    assert read_message(b'{"kind": "of a later version"}') == {"kind": "of a later version"}


def test_an_agent_that_sends_nonsense_is_let_go_and_why_is_said() -> None:
    lost: list[Lost] = []
    with attended(lost_ones=lost) as control:
        agent = connect([("127.0.0.1", control.port)], control.secret)
        agent.send("hello", node=0)
        wait_for(lambda: not control.missing)
        agent.send("port", port="29500")
        wait_for(lambda: bool(lost))
        agent.close()
    sentence = lost_sentence(lost[0], "b", 1, "start-up")
    assert "host b (rank 1) was let go: it sent what no agent of this version sends" in sentence
    assert "`port`.port is '29500', not a whole number" in sentence
