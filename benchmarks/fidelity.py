"""First-token times of a real replica beside a simulated one that was calibrated on it.

    python benchmarks/fidelity.py URL [--model NAME] [--tokenizer FOLDER]

Calibrates the (idle) replica at URL, starts a simulated one with the result, and sends both the
same single requests: cold, warm and half cached, in sizes that the calibration did not use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from loadgen.calibrate.command import describe
from loadgen.calibrate.fit import fit
from loadgen.calibrate.probes import Plan, Probes
from loadgen.client import Client
from loadgen.outcome import Outcome
from loadgen.workload.model import Completion
from loadgen.workload.text import prose

SIZES = (200, 700, 1300, 1900)
RUNS = 3
CHARS_PER_TOKEN = 4.4


class Row(NamedTuple):
    """One kind of request, in the replicas' own tokens."""

    kind: str
    prompt_tokens: int
    cached_tokens: int
    real_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """How far the simulated replica is off, relative to the real one."""
        return self.simulated_s / self.real_s - 1


async def calibrated(url: str, model: str, longest: int, budget_s: float) -> dict[str, Any]:
    """The content of a calibration file."""
    async with Client(url, model) as client:
        measured = await Probes(client, Plan(longest, budget_s), secrets.randbits(64)).measure()
    return describe(model, measured, fit(measured.prefills, measured.decodes))


async def compare(real: str, simulated: str, model: str, sizes: Sequence[int]) -> list[Row]:
    """The same requests to both, one at a time, the replicas taking turns."""
    seed = secrets.randbits(64)
    async with Client(real, model) as theirs, Client(simulated, model) as ours:
        rows = []
        for tokens in sizes:
            chars = int(tokens * CHARS_PER_TOKEN)
            kinds: dict[str, list[tuple[Outcome, Outcome]]] = {"cold": [], "warm": [], "half": []}
            for run in range(RUNS):
                whole = mixed(seed, f"{tokens} {run}", chars)
                half = whole[: chars // 2] + mixed(seed, f"{tokens} {run} new", chars // 2)
                for kind, prompt in (("cold", whole), ("warm", whole), ("half", half)):
                    kinds[kind].append((await sent(theirs, prompt), await sent(ours, prompt)))
            rows += [row(kind, pairs) for kind, pairs in kinds.items()]
    return rows


def mixed(seed: int, name: str, chars: int) -> str:
    """Text that starts with words of its own."""
    random = Random(f"{seed} {name}")
    return f"{random.getrandbits(64):016x} " + prose(random, chars)


async def sent(client: Client, prompt: str) -> Outcome:
    outcome = await client.send(
        Completion(prompt, 1), Outcome(0, 0, asyncio.get_running_loop().time())
    )
    assert outcome.error is None, outcome.detail
    return outcome


def row(kind: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> Row:
    """The fastest of each, because what else the machine does can only slow a run down."""
    real, simulated = zip(*pairs, strict=True)
    sizes = [(each.prompt_tokens, each.cached_tokens) for each in real]
    assert sizes == [(each.prompt_tokens, each.cached_tokens) for each in simulated], kind
    return Row(kind, *sizes[0], min(map(ttft_s, real)), min(map(ttft_s, simulated)))


def ttft_s(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None
    return outcome.ttft_s


def table(rows: Sequence[Row]) -> str:
    lines = ["kind  prompt  cached    real s  simulated s   error"]
    lines += [
        f"{each.kind}  {each.prompt_tokens:6}  {each.cached_tokens:6}  {each.real_s:8.3f}"
        f"  {each.simulated_s:11.3f}  {each.error:+6.1%}"
        for each in rows
    ]
    lines.append(f"largest: {max(abs(each.error) for each in rows):.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--block-size", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        found = asyncio.run(calibrated(given.url, given.model, 2048, 90.0))
        print(json.dumps(found["timing"]), f"largest error of the fit {found['worst_error']:.1%}")
        path.write_text(json.dumps(found))
        command = [sys.executable, "-m", "loadgen.replica", "--calibration", str(path)]
        command += ["--model", given.model, "--block-size", str(given.block_size)]
        command += ["--exit-on-stdin-eof"]
        command += ["--tokenizer", str(given.tokenizer)] if given.tokenizer else []
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 60)[0], "it does not start"
            url = json.loads(process.stdout.readline())["replicas"][0]["url"]
            print(table(asyncio.run(compare(given.url, url, given.model, SIZES))))
        finally:
            process.communicate()


if __name__ == "__main__":
    main()
