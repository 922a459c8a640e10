"""`kvroute doctor` as a person meets it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.router.simulated import FOLDER, Start, declared, language, starting
from tests.router.support import answer_ok, json_answer, scripted


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with starting(language()) as started:
        yield started


async def doctor(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "router.cli", "doctor", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def test_a_healthy_fleet(start: Start) -> None:
    fleet = await start(replicas=2)
    urls = [each.url for each in fleet.replicas]
    status, out, error = await doctor(*urls, "--tokenizer", str(FOLDER))
    assert (status, out.splitlines()[-1]) == (0, "2 replicas: nothing is wrong.")
    assert error.splitlines()[-1].startswith("2/2 ")
    assert "of 1" in out and "not tried" not in out
    status, out, _ = await doctor(*urls, "--passive")
    assert status == 0 and "reuse itself was not tried" in out


async def test_what_is_wrong_and_how_to_mend_it(start: Start) -> None:
    fleet = await start(prefix_caching=False, prompt_tokens_details=False)
    url = fleet.replicas[0].url
    status, out, _ = await doctor(url)
    assert status == 1
    assert "error prefix_caching_off" in out and "warning prompt_tokens_details_off" in out
    assert "  mend  start vLLM with --enable-prompt-tokens-details\n" in out
    assert out.splitlines()[-1] == "1 replica: 1 error, 1 warning."
    status, out, _ = await doctor(url, "--json")
    said = json.loads(out)
    assert status == 1
    assert [each["code"] for each in said["findings"]] == [
        "prefix_caching_off",
        "prompt_tokens_details_off",
    ]
    assert said["findings"][0].keys() == {"code", "severity", "replica", "seen", "why", "mend"}
    assert said["replicas"][0]["block_tokens"] == 16


async def test_what_a_replica_says_is_not_obeyed_by_the_terminal() -> None:
    async with scripted(answer_ok) as (replica,):
        replica.gets["/version"] = json_answer({"version": "0.32.0\x1b]0;x\x07 [red]"})
        status, out, error = await doctor(replica.url, "--passive")
        assert status == 1 and "0.32.0?]0;x? [red]" in out
        assert "\x1b" not in out + error and "\x07" not in out + error


async def test_it_reads_the_settings_of_serve(start: Start, tmp_path: Path) -> None:
    fleet = await start(version="0.30.0")
    config = tmp_path / "kvroute.yaml"
    config.write_text(yaml.safe_dump({"replicas": [declared(fleet)], "tokenizer": str(FOLDER)}))
    for urls in ((), (fleet.replicas[0].url,)):
        status, out, _ = await doctor(*urls, "--config", str(config))
        assert status == 0, out  # a note alone: an older engine, whose publishers are named
        assert "note engine_old" in out and "events_not_listed" not in out
    status, out, _ = await doctor(fleet.replicas[0].url)
    assert status == 1 and "error events_not_listed" in out


async def test_what_cannot_be_run(tmp_path: Path) -> None:
    status, _, error = await doctor()
    assert (status, error) == (
        2, "kvroute: no replicas: give their URLs, or --config FILE with `replicas`\n"
    )  # fmt: skip
    status, _, error = await doctor("https://10.0.0.1")
    assert status == 2 and "TLS to replicas is not supported" in error
    status, _, error = await doctor("http://127.0.0.1:1", "--tokenizer", str(tmp_path))
    assert status == 2 and "tokenizer.json" in error


async def test_help_has_examples_and_the_exit_status() -> None:
    status, out, _ = await doctor("--help")
    assert status == 0
    assert "Examples" in out and "--passive" in out and "Exit status" in out
