"""Routing policies on the same traffic over given replicas, to compare their order.

    python benchmarks/ranking.py --tokenizer FOLDER URL URL...

For each policy it empties the replicas' caches (which needs vLLM's developer mode), starts a
gateway, plays the conversations of `kvroute demo --engine vllm` and prints first-token times. Over
simulated replicas that were calibrated on real ones the order should be that of the demo, which
plays them over the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from loadgen.client import Client, Deadlines
from loadgen.demo.real import RealSettings, emptied, real_workload
from loadgen.engine.launch import MODEL
from loadgen.run import run_workload
from loadgen.stats import Summary, summarise

POLICIES = ("cost", "least_load", "round_robin")


async def play(policy: str, urls: tuple[str, ...], tokenizer: Path, seed: int) -> Summary:
    """One policy's traffic on emptied replicas, before a fresh gateway."""
    async with (
        emptied(urls, tokenizer, (), policy) as fleet,
        Client(fleet.url, MODEL, deadlines=Deadlines(5, 120, 180)) as client,
    ):
        run = await run_workload(real_workload(RealSettings(seed)), client, deadline_s=600)
        return summarise(run.outcomes, len(urls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    print("policy        ttft mean s   p50 s   p99 s  cached  errors", flush=True)
    means = {}
    for policy in given.policies.split(","):
        found = asyncio.run(play(policy, tuple(given.urls), given.tokenizer, given.seed))
        means[policy] = found.ttft_mean_s
        print(
            f"{policy:12}  {found.ttft_mean_s:11.3f}  {found.ttft_p50_s:6.3f}"
            f"  {found.ttft_p99_s:6.3f}  {found.cached_fraction:6.1%}  {found.errors:6}",
            flush=True,
        )
    print("order:", ", ".join(sorted(means, key=means.__getitem__)))


if __name__ == "__main__":
    main()
