import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.run import MAX_LAG_P99_S, Run, run_workload
from loadgen.workload import Chat, Session, Turn, Workload
from loadgen.workload.model import Completion


class VirtualTime:
    """A clock for one test: sleeping sessions wake in order, without real waiting."""

    def __init__(self):
        self.now_s = 100.0

    def clock(self):
        return self.now_s

    async def sleep(self, delay_s):
        wake_s = self.now_s + delay_s
        await asyncio.sleep(0)
        self.now_s = max(self.now_s, wake_s)


class Echo:
    """Answers turn n with "reply n" after `takes_s` of the test's clock; can fail some turns."""

    def __init__(self, time, takes_s=0.5, fails=()):
        self.time, self.takes_s, self.fails = time, takes_s, fails
        self.requests = []

    async def send(self, request, outcome):
        self.requests.append(request)
        outcome.sent_s = self.time.clock()
        await self.time.sleep(self.takes_s)
        outcome.first_token_s = outcome.done_s = self.time.clock()
        outcome.reply = f"reply {outcome.turn}"
        if (outcome.session, outcome.turn) in self.fails:
            outcome.error = "http_500"
        return outcome


def talk(start_s, *thinks_s):
    return Session(
        start_s,
        tuple(Turn(f"turn {i}", 4, think_s) for i, think_s in enumerate(thinks_s)),
        "system",
    )


async def run(workload, sender, time, **kwargs):
    kwargs = {"deadline_s": 30, "sleep": time.sleep, "clock": time.clock} | kwargs
    return await run_workload(workload, sender, **kwargs)


async def test_a_turn_carries_the_replies_and_is_due_a_think_time_after_them():
    time = VirtualTime()
    sender = Echo(time)
    result = await run(Workload("w", (talk(2.0, 0.0, 1.0, 3.0),)), sender, time)
    assert [o.due_s for o in result.outcomes] == [102.0, 103.5, 107.0]
    assert sender.requests[2] == Chat(
        (
            ("system", "system"),
            ("user", "turn 0"),
            ("assistant", "reply 0"),
            ("user", "turn 1"),
            ("assistant", "reply 1"),
            ("user", "turn 2"),
        ),
        4,
    )
    assert result.valid and result.lag_p99_s == 0


async def test_a_completion_knows_nothing_of_replies():
    session = Session(0.0, (Turn(" a", 1), Turn(" b", 2)))
    assert session.request(["x"]) == Completion(" b", 2)


async def test_a_failed_turn_ends_its_session_and_no_other():
    time = VirtualTime()
    workload = Workload("w", (talk(0.0, 0.0, 1.0, 1.0), talk(0.0, 0.0, 1.0)))
    seen = []
    result = await run(workload, Echo(time, fails={(0, 1)}), time, on_outcome=seen.append)
    assert [o.error for o in result.outcomes] == [None, "http_500", "not_sent", None, None]
    assert len(seen) == 4


async def test_starts_do_not_wait_for_replies():
    """Open loop: a server that never answers gets every session's first turn all the same."""

    class Silent:
        sent = 0
        all_sent = asyncio.Event()

        async def send(self, request, outcome):
            outcome.sent_s = outcome.due_s
            self.sent += 1
            if self.sent == 20:
                self.all_sent.set()
            await asyncio.Event().wait()

    workload = Workload("w", tuple(talk(i / 1000, 0.0, 0.0) for i in range(20)))
    server = Silent()
    result = await run_workload(workload, server, deadline_s=0.2)
    assert server.all_sent.is_set()
    assert [o.error for o in result.outcomes] == ["timeout", "not_sent"] * 20


async def test_a_late_client_marks_the_run_invalid():
    time = VirtualTime()

    async def oversleep(delay_s):
        await time.sleep(delay_s + 2 * MAX_LAG_P99_S)

    result = await run(Workload("w", (talk(1.0, 0.0),)), Echo(time), time, sleep=oversleep)
    assert not result.valid
    assert Run(result.outcomes, 1.0).lag_p99_s > MAX_LAG_P99_S


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(0, 5), min_size=1, max_size=5), min_size=1, max_size=6))
async def test_every_request_is_accounted_for_in_order(thinks):
    time = VirtualTime()
    workload = Workload("w", tuple(talk(0.0, *one) for one in thinks))
    result = await run(workload, Echo(time), time)
    assert len(result.outcomes) == workload.requests
    for one, following in pairwise(result.outcomes):
        assert (one.session, one.turn) < (following.session, following.turn)
