"""A receipt as a person reads it: a table of candidates, why, and what then happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.policy import MEANINGS

MAX_ROWS = 16
"""Candidates shown; of a large fleet those with the least scores."""
Json = dict[str, Any]
_SECONDS = ("queue", "prefill", "running", "total")
_STATES = {
    "running": "still running",
    "answered": "answered",
    "cut": "cut: the answer had begun and broke off",
    "client_left": "the client left",
    "failed": "failed",
    "refused": "refused",
}


def rendered(told: Json) -> RenderableType:
    """A stored receipt, or an explanation, which has no outcome."""
    parts: list[RenderableType] = [_facts(told)]
    if told["candidates"]:
        parts.append(_table(told))
    parts.append(_pairs([("why", told["why"]), *_unusable(told)]))
    if "outcome" in told:
        parts += [Text(), _pairs(list(_happened(told)))]
    return Group(*parts)


def _plain(value: object) -> Text:
    """Text that a client may have chosen: shown, and never obeyed by a terminal."""
    return Text("".join(each if each.isprintable() else "?" for each in str(value)))


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, _plain(value))
    return table


def _facts(told: Json) -> Table:
    asked = told["request"]
    rows = []
    if "request_id" in told:
        many = told["requests_with_this_id"]
        others = f" (the latest of {many} with this id)" if many > 1 else ""
        rows.append(("request", f"{told['request_id']}{others}"))
        rows.append(("time", told["time"]))
    rows.append(("asked", f"{asked['method']} {asked['path']}, {_model(asked)}"))
    rows.append(("prompt", _prompt(asked)))
    for root in told["roots"]:
        adapter = f" + {root['adapter']}" if root["adapter"] else ""
        rows.append(("root", f"{root['digest']}: {root['model']}{adapter}"))
        rows += [("holds", each) for each in _uncounted(told, root)]
    if asked["tokens_known"] and not told["roots"]:
        rows.append(("root", f"none: nothing is matched below {told['unit_tokens'] + 1} tokens"))
    rows.append(("policy", f"{told['policy']}, units of {told['unit_tokens']} tokens"))
    return _pairs(rows)


def _model(asked: Json) -> str:
    return f"model {asked['model']}" if asked["model"] is not None else "no model named"


def _prompt(asked: Json) -> str:
    salted = ", salted" if asked["salt_digest"] else ""
    if not asked["tokens_known"] and not asked["prompt_tokens"]:
        return f"none was looked at{salted}"
    if not asked["tokens_known"]:
        return f"about {asked['prompt_tokens']:,} tokens, guessed: nothing can be matched{salted}"
    sources = {
        "given": "given as token ids",
        "local": "tokenized here",
        "replica": "tokenized by a replica",
    }
    return f"{asked['prompt_tokens']:,} tokens, {sources[asked['tokens_from']]}{salted}"


def _uncounted(told: Json, root: Json) -> Iterator[str]:
    """Holders that no candidate's credit shows."""
    candidates = {(each["replica"], each["rank"]) for each in told["candidates"]}
    for held in root["holders"]:
        where = held["replica"], held["rank"]
        if held["credited"] and where in candidates:
            continue
        reason = "no candidate" if held["credited"] else f"on its {held['tier']}: no credit"
        yield f"{where[0]}/{where[1]} {held['matched_tokens']:,} tokens ({reason})"


def _table(told: Json) -> RenderableType:
    scored = told["policy"] != "cost"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("candidate", overflow="fold")
    for name in ("matched", *(f"{each} s" for each in _SECONDS), *(["score"] if scored else [])):
        table.add_column(name, justify="right", no_wrap=True)
    best = sorted(told["candidates"], key=lambda each: (not each["chosen"], each["score"]))
    for each in best[:MAX_ROWS]:
        table.add_row(*_row(each, scored), style="bold" if each["chosen"] else "")
    notes: list[RenderableType] = []
    if len(best) > MAX_ROWS:
        notes.append(Text(f"and {len(best) - MAX_ROWS} more; --json shows all"))
    if scored:
        notes.append(Text(f"score: {MEANINGS.get(told['policy'], told['score_means'])}"))
    return Group(Text(), table, *notes, Text())


def _row(candidate: Json, scored: bool) -> list[RenderableType]:
    spent = candidate["predicted_s"]
    prefill = spent["prefill_fixed"] + spent["prefill_tokens"]
    seconds = (spent["queue"], prefill, spent["running"], spent["total"])
    return [
        Text("->" if candidate["chosen"] else ""),
        _plain(f"{candidate['replica']}/{candidate['rank']}"),
        Text(f"{candidate['matched_tokens']:,}"),
        *(Text(f"{each:.3f}") for each in seconds),
        *([Text(f"{candidate['score']:g}")] if scored else []),
    ]


def _unusable(told: Json) -> Iterator[tuple[str, str]]:
    """What is not as it should be, of an explanation: it is of the present."""
    for each in told["candidates"]:
        trust = each.get("trust", "exact")
        if trust != "exact":
            reason = f"trust in its KV events: {trust}" if trust else "it publishes no KV events"
            yield "events", f"{each['replica']}/{each['rank']}: {reason}"
    for replica, reason in told.get("left_out", {}).items():
        yield "left out", f"{replica}: {reason}"


def _happened(told: Json) -> Iterator[tuple[str, str]]:
    happened = told["outcome"]
    for number, tried in enumerate(told["attempts"][:-1], 1):
        where = f"{tried['replica']}/{tried['rank']}"
        yield f"attempt {number}", f"{where} {tried['outcome']}: {tried['reason']}"
    yield "outcome", _outcome(told)
    yield "time", _times(happened)
    if happened["status"] == 200:
        yield "reused", _reused(told)


def _outcome(told: Json) -> str:
    happened = told["outcome"]
    text = _STATES.get(told["state"], str(told["state"]))
    if happened["replica"] is not None:
        text += " by" if told["state"] == "answered" else ", at"
        text += f" {happened['replica']}/{happened['rank']}"
    if happened["status"] is not None:
        text += f", status {happened['status']}"
    if happened["error"] is not None:
        text += f", {happened['error']}"
    retries = happened["retries"]
    return text + (f", after {retries} {'retry' if retries == 1 else 'retries'}" if retries else "")


def _times(happened: Json) -> str:
    parts = []
    if happened["first_byte_s"] is not None:
        parts.append(f"first byte after {happened['first_byte_s']:.3f} s")
    parts.append(f"{happened['total_s']:.3f} s in all")
    if happened["first_token_s"] is not None:
        predicted = happened["first_token_s"] + happened["predicted_minus_true_s"]
        parts.append(
            f"first token {happened['first_token_s']:.3f} s after it was sent, "
            f"predicted {predicted:.3f} s"
        )
    return "; ".join(parts)


def _reused(told: Json) -> str:
    happened = told["outcome"]
    predicted = f"predicted {told['chosen']['matched_tokens']:,}"
    if happened["cached_tokens"] is None:
        return f"the engine did not say; {predicted} tokens"
    prompt = happened["prompt_tokens"]
    of = f" of {prompt:,}" if prompt is not None else ""
    return f"{happened['cached_tokens']:,}{of} tokens, says the engine; {predicted}"
