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
import subprocess
import sys
import time
from pathlib import Path

import httpx

from loadgen.client import Client, Deadlines
from loadgen.demo.real import RealSettings, real_workload
from loadgen.run import run_workload
from loadgen.stats import Summary, summarise

POLICIES = ("cost", "least_load", "round_robin")
START_S = 60.0


def start_gateway(
    policy: str, urls: list[str], tokenizer: Path
) -> tuple[subprocess.Popen[bytes], str]:
    command = [str(Path(sys.executable).with_name("kvroute")), "serve", "--port", "0"]
    command += ["--policy", policy, "--tokenizer", str(tokenizer), "--exit-on-stdin-eof"]
    command += [part for url in urls for part in ("--replica", url)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    url = process.stdout.readline().decode().rpartition(" ")[2].strip()
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        states = httpx.get(f"{url}/readyz", timeout=5).json()["replicas"].values()
        if all(each["healthy"] and each["trust"] == "exact" for each in states):
            return process, url
        time.sleep(0.1)
    raise SystemExit(f"the gateway is not ready: {states}")


async def play(policy: str, urls: list[str], model: str, tokenizer: Path, seed: int) -> Summary:
    for url in urls:
        httpx.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
        # vLLM tells of a reset with its next step.
        body = {"model": model, "prompt": f"After the reset {time.time()}", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    process, gateway = start_gateway(policy, urls, tokenizer)
    try:
        async with Client(gateway, model, deadlines=Deadlines(5, 120, 180)) as client:
            run = await run_workload(real_workload(RealSettings(seed)), client, deadline_s=600)
        return summarise(run.outcomes, len(urls))
    finally:
        process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    print("policy        ttft mean s   p50 s   p99 s  cached  errors", flush=True)
    means = {}
    for policy in given.policies.split(","):
        found = asyncio.run(play(policy, given.urls, given.model, given.tokenizer, given.seed))
        means[policy] = found.ttft_mean_s
        print(
            f"{policy:12}  {found.ttft_mean_s:11.3f}  {found.ttft_p50_s:6.3f}"
            f"  {found.ttft_p99_s:6.3f}  {found.cached_fraction:6.1%}  {found.errors:6}",
            flush=True,
        )
    print("order:", ", ".join(sorted(means, key=means.__getitem__)))


if __name__ == "__main__":
    main()
