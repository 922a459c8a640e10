import asyncio
import sys

import pytest

from loadgen.demo import child as child_module
from loadgen.demo import fleet
from loadgen.demo.child import Child
from loadgen.demo.fleet import Fleet
from loadgen.errors import ProcessDied, StartError


async def start(code: str) -> Child:
    return await Child.start("the child", [sys.executable, "-S", "-c", code])


async def test_a_child_says_where_it_serves_and_is_ended():
    child = await start("import time; print('here', flush=True); time.sleep(60)")
    assert await child.announcement() == "here\n"
    assert child.returncode is None
    await child.close()
    assert child.returncode == 128 + 15


async def test_a_child_without_a_word_is_a_start_error(monkeypatch):
    monkeypatch.setattr(child_module, "START_DEADLINE_S", 0.2)
    child = await start("import time; time.sleep(60)")
    with pytest.raises(StartError, match="the child was not up"):
        await child.announcement()
    await child.close()


async def test_a_child_that_ends_early_is_quoted():
    child = await start("import sys; sys.exit('no such port')")
    with pytest.raises(StartError, match=r"ended with code 1:\nno such port"):
        await child.announcement()
    await child.close()


async def test_more_output_than_a_pipe_holds_does_not_stop_a_child():
    child = await start("print('here', flush=True); print('x' * 300_000); print('last words')")
    await child.announcement()
    await asyncio.wait_for(child.wait(), 10)
    assert child.returncode == 0 and child.output().endswith("last words")
    await child.close()


async def test_output_is_the_same_wherever_the_pipe_cuts_it():
    slow = "import sys, time; say = sys.stdout; print('here', flush=True)\n"
    slow += "for part in ('one ', 'line', '\\n', 'la', 'st\\n'):\n"
    slow += "    say.write(part); say.flush(); sys.stderr.write('.'); time.sleep(0.05)"
    child = await start(slow)
    await child.announcement()
    await asyncio.wait_for(child.wait(), 10)
    assert child.output() == ".....\none line\nlast"
    await child.close()


async def test_a_death_during_the_run_is_reported():
    lasting = await start("import time; print('here', flush=True); time.sleep(60)")
    dying = await start("print('here', flush=True); input")
    for child in (lasting, dying):
        await child.announcement()
    with pytest.raises(ProcessDied, match="the child ended with code 0") as died:
        await asyncio.wait_for(Fleet("http://x", (), (lasting, dying)).died(), 10)
    assert str(died.value).count("ended") == 1
    for child in (lasting, dying):
        await child.close()


async def test_settings_of_a_gateway_do_not_leak_in(monkeypatch):
    monkeypatch.setenv("KVROUTE_POLICY", "random")
    child = await start("import os; print([k for k in os.environ if 'KVROUTE' in k], flush=True)")
    assert await child.announcement() == "[]\n"
    await child.close()


@pytest.mark.parametrize(
    ("readiness", "ready"),
    [
        (None, False),
        ({"status": "starting", "replicas": {}}, False),
        ({"status": "ready", "replicas": {"a": {"healthy": True, "trust": "exact"}}}, False),
        (
            {
                "status": "ready",
                "replicas": {
                    "a": {"healthy": True, "trust": "exact"},
                    "b": {"healthy": True, "trust": "none"},
                },
            },
            False,
        ),
        (
            {
                "status": "ready",
                "replicas": {name: {"healthy": True, "trust": "exact"} for name in "ab"},
            },
            True,
        ),
    ],
)
def test_ready_means_every_replica_is_healthy_and_trusted(readiness, ready):
    assert fleet._all_ready(readiness, 2) is ready


def test_addresses_are_read_from_the_announcements():
    line = '{"replicas": [{"url": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:2"}]}\n'
    assert fleet._replica_urls(line) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    url = fleet._gateway_url("kvroute: listening on http://127.0.0.1:3\n")
    assert url == "http://127.0.0.1:3"
    for parse in (fleet._replica_urls, fleet._gateway_url):
        with pytest.raises(StartError, match="announced"):
            parse("{}\n")
