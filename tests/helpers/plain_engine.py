"""One engine with chunked prefill, simulated a step at a time: the oracle of the planner."""

from kvxfer.pd.planner import StepModel, Trace
from kvxfer.pd.planner.engine_model import pairs_of


def serve(trace: Trace, steps: StepModel, *, budget: int, max_num_seqs: int) -> list[list[float]]:
    """When each request's tokens come, in seconds; memory has no limit."""
    tokens: list[list[float]] = [[] for _ in trace.requests]
    computed = [0] * len(trace.requests)
    running: list[int] = []
    now_s = 0.0
    while any(len(tokens[at]) < one.num_output_tokens for at, one in enumerate(trace.requests)):
        waiting = [
            at
            for at, one in enumerate(trace.requests)
            if one.arrival_s <= now_s and not computed[at] and at not in running
        ]
        decoding = [at for at in running if tokens[at]]
        left = budget - len(decoding)
        chunks: dict[int, int] = {}
        for at in [one for one in running if not tokens[one]] + waiting:
            if left <= 0 or (at not in running and len(running) >= max_num_seqs):
                break
            if at not in running:
                running.append(at)
            chunks[at] = min(left, trace.requests[at].num_prompt_tokens - computed[at])
            left -= chunks[at]
        if not running:
            now_s = min(one.arrival_s for one in trace.requests if one.arrival_s > now_s)
            continue
        single = [at for at, count in chunks.items() if count == 1]
        prompts = {at: count for at, count in chunks.items() if count > 1}
        now_s += steps.step_s(
            num_decoding=len(decoding) + len(single),
            num_context_tokens=sum(
                trace.requests[at].num_prompt_tokens + len(tokens[at]) for at in decoding
            )
            + sum(computed[at] + 1 for at in single),
            num_prompt_tokens=sum(prompts.values()),
            num_pairs=sum(pairs_of(count, computed[at]) for at, count in prompts.items()),
        )
        for at, count in chunks.items():
            computed[at] += count
        whole = [at for at in chunks if computed[at] == trace.requests[at].num_prompt_tokens]
        for at in decoding + whole:
            tokens[at].append(now_s)
        running = [at for at in running if len(tokens[at]) < trace.requests[at].num_output_tokens]
    return tokens
