"""A server under a fixed number of requests, step by step: all come at once, and whenever one is answered the next one comes.

An engine reads waiting prompts first, as many tokens a step as its limit allows. Engines that mix give every running sequence a
token in the same step; the others read prompts in steps of their own, while answers wait. An engine may look for requests only
every so many steps (SGLang's `scheduler_recv_interval`), or let prompts wait for others while answers run (TensorRT-LLM's
`batch_wait_timeout_iters`, and `timeout_iters` of ranks with batches of their own). Steps between two events are alike, so they are
counted, not walked. Lengths vary a little: requests of one length would end together, and come again together.
"""

import functools
import heapq
import random

import msgspec

from loadgauge.core.definitions.serving.inference import PREFILL

ROUNDS = 10
"""Requests that are measured, over those at once: what benchmarks of servers ask for (vLLM's `benchmark_serving`, ten prompts for
each of `--max-concurrency`); the first of them wait for one another."""
SPREAD = 0.1
"""Largest distance of a length from the mean, as a share of the mean."""
BUDGET = PREFILL
MOST = 512
"""Requests at once that are followed one by one; of more, each stands for several."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load on a server.

    requests: at once, of all ranks with batches of their own; prompt, answer: tokens of each
    reading: seconds of one prompt; more: of each further one in the same step, None: as many
    idle, each: seconds of a step of nothing, and more of it for each sequence of a rank; slots: sequences of all ranks that fit
    mixed: whether a step reads prompts and makes tokens; ranks: that have batches of their own, and step together
    together: share of `more` that all ranks do for all prompts (experts), whoever reads them
    budget: tokens of prompts that a step of a rank reads at most; polls: steps from one look for requests to the next
    patience: steps that a prompt waits for others while answers run; company: tokens of waiting prompts that end the wait
    """

    requests: int
    prompt: int
    answer: int
    reading: float
    idle: float
    each: float
    slots: float
    more: float | None = None
    mixed: bool = True
    ranks: int = 1
    together: float = 0.0
    budget: int = BUDGET
    polls: int = 1
    patience: int = 0
    company: float = 0.0


class Found(msgspec.Struct, frozen=True):
    """Means over all requests: seconds until a first token, and of a token after it."""

    first: float
    token: float


@functools.lru_cache(maxsize=4096)
def closed_loop(load: Load, rounds: int = ROUNDS, spread: float = SPREAD) -> Found:
    """Follow `rounds` times as many requests as are at once. spread: of lengths

    Requests that all find a place wait for the prompts before them, (n + 1) / 2 of them in the mean; alone, one waits for its own.

    >>> one = Load(requests=1, prompt=1024, answer=100, reading=0.1, idle=0.01, each=0.0, slots=9, mixed=False)
    >>> round(closed_loop(one, spread=0).first, 6), round(closed_loop(one, spread=0).token, 6)
    (0.1, 0.01)
    >>> four = msgspec.structs.replace(one, requests=4, prompt=8192)
    >>> round(closed_loop(four, rounds=1, spread=0).first, 6)
    0.25
    """
    scale = max(1.0, load.requests / MOST)
    at_once = max(1, round(load.requests / scale))
    whole = rounds * at_once
    rates = random.Random(0)
    prompts = [load.prompt * (1 + spread * (2 * rates.random() - 1)) for _ in range(whole)]
    answers = [max(1, round(load.answer * (1 + spread * (2 * rates.random() - 1)))) for _ in range(whole)]
    more = load.reading if load.more is None else load.more
    start, of_token, each = load.reading - more, scale * more / load.prompt, scale * load.each / load.ranks
    budget, room_of_all, company = load.budget / scale, load.ranks * load.budget / scale, load.company / scale
    places = max(1, int(load.slots / scale))
    now = first = token = 0.0
    came, began = [0.0] * whole, [0.0] * whole
    ends: list[tuple[int, int]] = []
    steps = done = head = running = polled = since = 0
    coming, left = min(at_once, whole), prompts[0]
    seen = coming
    while done < whole:
        polled = steps if not running else steps - (steps - polled) % load.polls
        if polled == steps:
            since = steps if head == seen else since
            seen = coming
        able = head < seen and running < places
        # A prompt that is half read does not wait.
        if able and (
            steps - since >= load.patience or not running or left < prompts[head] or sum(prompts[head:seen]) >= company
        ):
            # Tokens of answers come out of the limit too, but never all of it.
            room = max(room_of_all - (running if load.mixed else 0), room_of_all / 4)
            read = longest = 0.0
            free, begun = places - running, []
            while head < seen and room > 0 and free:
                part = min(left, room, budget)
                room, read, left, longest = room - part, read + part, left - part, max(longest, part)
                if left > 1e-9:
                    if load.ranks > 1:
                        break
                else:
                    begun.append(head)
                    head, free = head + 1, free - 1
                    if head < whole:
                        left = prompts[head]
            # What a step takes whatever its prompts (matrices of experts that are read) it takes once, tokens or not.
            shared = read / load.ranks
            now += of_token * ((1 - load.together) * max(longest, shared) + load.together * shared)
            if load.mixed:
                now += max(start, load.idle + each * running)
                steps += 1
            else:
                now += start
            for request in begun:
                began[request] = now
                first += now - came[request]
                heapq.heappush(ends, (steps + answers[request] - 1, request))
            running += len(begun)
            # The engine looks for requests after a step with prompts; what is left waits anew.
            polled, since = steps - load.polls, steps
        else:
            until = ends[0][0]
            if coming > seen:
                until = min(until, polled + load.polls)
            if able:
                until = min(until, since + load.patience)
            if until > steps:
                now += (until - steps) * (load.idle + each * running)
                steps = until
        while ends and ends[0][0] <= steps:
            request = heapq.heappop(ends)[1]
            running, done = running - 1, done + 1
            token += (now - began[request]) / max(1, answers[request] - 1)
            if coming < whole:
                came[coming] = now
                coming += 1
    return Found(first / whole, token / whole)
