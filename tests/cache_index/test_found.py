"""Histories in which the judge once convicted the index, shrunk, one test each."""

from __future__ import annotations

from .judge.blocks import Prompt, Root
from .judge.engine import EngineConfig
from .judge.stage import History, Op
from .judge.world import World
from .listener import PureListener

PLAIN = Prompt(Root(), (0,))
LONG = Prompt(Root(), (1, 0, 1))
TWINS = (Prompt(Root(), (0, 0)), Prompt(Root(), (0, 1)))


def run(
    *ops: Op,
    buffer: int = 1000,
    block_units: int = 1,
    prompts: tuple[Prompt, ...] = (PLAIN, LONG),
    reports_again: bool = False,
) -> None:
    """Judge a history of one rank. Raises Misjudged."""
    config = EngineConfig(block_units=block_units, reports_again=reports_again)
    World(History((config,), (buffer,), prompts, prompts, ops), PureListener(1)).run()


def test_a_replay_that_begins_after_the_batch_asked_for_confirms_nothing() -> None:
    """The buffer of the next life began just there, and was taken for a continuation."""
    run(
        ("join", 0),
        ("compute", 0, 0, 1, False),
        ("step", 0),
        ("restart", 0, 0, False),
        ("lose", 0, 2),
        ("step", 0),
        ("step", 0),
        buffer=2,
    )


def test_what_was_held_back_proves_what_it_proved_when_it_came() -> None:
    """A message that waited for a replay renewed the lease when it was let go."""
    run(
        ("wait", 11.0),
        ("join", 0),
        ("compute", 0, 0, 1, False),
        ("step", 0),
        ("die", 0, 0),
        ("wait", 5.3),
    )


def test_a_part_of_a_replay_is_not_believed_where_replays_fail() -> None:
    """A store came, the removal after it did not, and the connection vouched for both."""
    run(
        ("join", 0),
        ("compute", 0, 0, 1, False),
        ("replays", 0, "no_end", 0),
        ("lose", 0, 2),
        ("step", 0),
        ("clear", 0, False),
        ("step", 0),
        ("step", 0),
        ("replays", 0, "torn", 1),
        ("wait", 11.0),
    )


def test_what_was_held_back_of_two_connections_is_not_one_chain() -> None:
    """Batch 0 of one life and batch 1 of the next waited together for a replay that failed."""
    run(
        ("join", 0),
        ("cut", 0, True),
        ("wait", 5.3),
        ("join", 0),
        ("compute", 0, 1, 3, False),
        ("step", 0),
        ("die", 0, 47),
        ("regain", 0, 1, 0),
        ("wait", 1.0),
        ("join", 0),
        ("step", 0),
        ("cut", 0, True),
        ("wait", 5.3),
    )


def test_a_block_keeps_the_units_that_it_shares_with_one_that_goes() -> None:
    run(
        ("join", 0),
        ("compute", 0, 0, 1, False),
        ("compute", 0, 1, 1, False),
        ("step", 0),
        ("evict", 0, 1, 1, False),
        ("step", 0),
        ("wait", 1.0),
        block_units=2,
        prompts=TWINS,
    )


def test_a_report_that_was_counted_as_a_copy_does_not_outlive_its_block() -> None:
    run(
        ("join", 0),
        ("compute", 0, 0, 2, False),
        ("step", 0),
        ("compute", 0, 0, 2, False),
        ("step", 0),
        ("evict", 0, 1, 1, False),
        ("step", 0),
        ("compute", 0, 1, 2, False),
        ("step", 0),
        ("wait", 11.0),
        prompts=TWINS,
        reports_again=True,
    )
