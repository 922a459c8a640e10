"""A receipt: what a request was decided on and what became of it, as JSON. Pure; see receipts.py.

The same for a request that was sent and for one that is only asked about (`kvroute explain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from router.call import CLIENT_LEFT, Attempt
from router.placement import DEVICE_TIER, RootMatch
from router.policy import MEANINGS, Candidate, Choice, Snapshot, parts, why
from router.receipts import Kept

Json = dict[str, Any]


def receipt(kept: Kept, policy: str, unit_tokens: int, *, known: int = 1) -> Json:
    """All there is to say of one request; `known` requests carry its id."""
    return {
        "request_id": kept.request_id.decode("latin-1"),
        "requests_with_this_id": known,
        "state": state(kept),
        "time": _time(kept),
        "request": _request(kept),
        **decision(kept, policy, unit_tokens),
        "attempts": _attempts(kept, policy),
        "outcome": _outcome(kept),
    }


def explanation(
    kept: Kept,
    policy: str,
    unit_tokens: int,
    left_out: Mapping[str, str],
    trust: Mapping[tuple[str, int], str],
) -> Json:
    """What would be done with a request now.

    `left_out`: replicas that are no candidates, and why; `trust` in the events of (replica, rank).
    """
    told = decision(kept, policy, unit_tokens)
    for each in told["candidates"]:
        each["trust"] = trust.get((each["replica"], each["rank"]))
    return {"request": _request(kept), **told, "left_out": dict(left_out)}


def decision(kept: Kept, policy: str, unit_tokens: int) -> Json:
    """What was known, what each candidate would have cost, what was chosen and why."""
    known = {
        "policy": policy,
        "unit_tokens": unit_tokens,
        "roots": [_root(each, unit_tokens) for each in kept.roots],
        "score_means": MEANINGS[policy],
    }
    if kept.snapshot is None or kept.choice is None:
        refused = f"refused before a replica was chosen: {kept.error_code or 'the client left'}"
        reason = "not decided yet" if kept.running else refused
        return {**known, "candidates": [], "chosen": None, "why": reason}
    candidates = _candidates(kept.snapshot, kept.choice, kept.trust)
    return {
        **known,
        "candidates": candidates,
        "chosen": candidates[kept.choice.chosen],
        "why": _why(policy, kept.snapshot, kept.choice, kept.reason, kept.on_trial),
    }


def summary(kept: Kept) -> Json:
    """One line of a list of requests."""
    outcome = _outcome(kept)
    chosen = kept.chosen
    return {
        "request_id": kept.request_id.decode("latin-1"),
        "state": state(kept),
        "time": _time(kept),
        "path": kept.path,
        "model": kept.model,
        "replica": kept.replica,
        "rank": chosen.rank if chosen else None,
        "prompt_tokens": kept.prompt_tokens,
        "matched_tokens": chosen.matched_tokens if chosen else None,
        **{name: outcome[name] for name in _SUMMARISED},
    }


_SUMMARISED = ("cached_tokens", "status", "error", "retries", "first_byte_s", "total_s")


def state(kept: Kept) -> str:
    """running, answered, cut (the answer had begun), client_left, failed, or refused unsent."""
    if kept.running:
        return "running"
    if kept.status == CLIENT_LEFT:
        return "client_left"
    if not kept.error_code:
        return "answered"
    if kept.first_byte_s is not None:
        return "cut"
    return "refused" if kept.snapshot is None else "failed"


def _time(kept: Kept) -> str:
    arrived_at_s = kept.ended_at_s - kept.total_s
    return datetime.fromtimestamp(arrived_at_s, UTC).isoformat(timespec="milliseconds")


def _request(kept: Kept) -> Json:
    return {
        "method": kept.method,
        "path": kept.path,
        "model": kept.model,
        "streaming": kept.streaming,
        "prompt_tokens": kept.prompt_tokens,
        "tokens_from": kept.source,
        "tokens_known": kept.source != "none",
        "salt_digest": kept.salt or None,
    }


def _root(match: RootMatch, unit_tokens: int) -> Json:
    base, adapter, digest, held = match
    holders = [
        {
            "replica": holder.replica,
            "rank": holder.rank,
            "tier": holder.tier,
            "matched_units": units,
            "matched_tokens": units * unit_tokens,
            "credited": holder.tier == DEVICE_TIER,
        }
        for holder, units in sorted(held.items(), key=lambda each: (-each[1], each[0]))
    ]
    names = {"model": base, "adapter": adapter or None}
    return {**names, "digest": f"{digest:016x}", "holders": holders}


def _candidates(
    snapshot: Snapshot, choice: Choice, trust: Mapping[tuple[str, int], str]
) -> list[Json]:
    """With the trust in their events as it was then, where the index was asked."""
    return [
        {
            **_candidate(each, snapshot, score, chosen=at == choice.chosen),
            **({"trust": trust.get((each.replica, each.rank))} if trust else {}),
        }
        for at, (each, score) in enumerate(zip(snapshot.candidates, choice.scores, strict=True))
    ]


def _candidate(candidate: Candidate, snapshot: Snapshot, score: float, *, chosen: bool) -> Json:
    spent = parts(candidate, snapshot.prompt_tokens, snapshot.running_cost_s)
    return {
        "replica": candidate.replica,
        "rank": candidate.rank,
        "chosen": chosen,
        "matched_tokens": candidate.matched_tokens,
        "uncached_tokens": max(snapshot.prompt_tokens - candidate.matched_tokens, 1),
        "queued_tokens": candidate.queued_tokens,
        "running": candidate.running,
        "predicted_s": {
            "queue": spent.queue_s,
            "prefill_fixed": spent.prefill_fixed_s,
            "prefill_tokens": spent.prefill_tokens_s,
            "running": spent.running_s,
            "total": spent.total_s,
        },
        "score": score,
    }


def _why(policy: str, snapshot: Snapshot, choice: Choice, reason: str, on_trial: bool) -> str:
    sentence = why(policy, snapshot, choice)
    if reason:
        return f"{sentence}: {reason}"
    return f"{sentence}: it waits for its trial request" if on_trial else sentence


def _attempts(kept: Kept, policy: str) -> list[Json]:
    """Every decision of this request, in order; the last one is what `outcome` tells of."""
    made = [_attempt(each, policy, kept) for each in kept.attempts]
    last = kept.attempts[-1] if kept.attempts else None
    if kept.snapshot is None or kept.choice is None:
        return made
    if last is None or last.snapshot is not kept.snapshot:
        now = Attempt(kept.snapshot, kept.choice, kept.on_trial, state(kept), kept.error_code)
        made.append(_attempt(now, policy, kept))
    return made


def _attempt(attempt: Attempt, policy: str, kept: Kept) -> Json:
    chosen = attempt.snapshot.candidates[attempt.choice.chosen]
    return {
        "replica": chosen.replica,
        "rank": chosen.rank,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "why": _why(policy, attempt.snapshot, attempt.choice, kept.reason, attempt.on_trial),
    }


def _outcome(kept: Kept) -> Json:
    chosen = kept.chosen
    answered = chosen is not None and kept.first_byte_s is not None
    retries = len(kept.attempts)
    if retries and kept.attempts[-1].snapshot is kept.snapshot:
        retries -= 1  # the last one was not followed by another
    return {
        "status": kept.status or None,
        "error": kept.error_code or None,
        "replica": chosen.replica if chosen and answered else None,
        "rank": chosen.rank if chosen and answered else None,
        "retries": retries,
        "routing_s": kept.routing_s,
        "first_byte_s": kept.first_byte_s,
        "first_token_s": kept.first_token_s,
        "total_s": kept.total_s,
        "prompt_tokens": kept.engine_prompt_tokens,
        "cached_tokens": kept.cached_tokens,
        **_errors(kept, chosen),
    }


def _errors(kept: Kept, chosen: Candidate | None) -> Json:
    """Prediction minus truth; None where there is nothing to compare."""
    tokens = seconds = None
    if chosen is not None and kept.snapshot is not None:
        if kept.cached_tokens is not None and kept.source != "none":
            tokens = chosen.matched_tokens - kept.cached_tokens
        if kept.first_token_s is not None:
            spent = parts(chosen, kept.snapshot.prompt_tokens, kept.snapshot.running_cost_s)
            seconds = spent.total_s - kept.first_token_s
    return {"matched_minus_cached_tokens": tokens, "predicted_minus_true_s": seconds}
