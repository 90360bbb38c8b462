"""Measures the queue under overload: goodput, refusals and fairness between API keys.

    python -m benchmarks.overload [--load 3] [--max-queue-wait 2] [--json FILE]

The real engine loop runs over an executor without a model, in simulated time (benchmarks/simulation.py): a step takes a
fixed time, and a time for each row and prompt token, as on one H100 with 8 billion parameters. So the figures do not
depend on the machine, and a minute of load takes seconds.

- capacity: requests answered in a second while twice as many are open as there are rows.
- goodput: requests in a second whose first token came within the limit, at a multiple of the capacity; once with
  --max-queue-wait and once without a limit of the wait.
- fairness: the time to the first token of one key's requests, one a second, after another key has sent 500 at once,
  divided by that time without them; the median over six such floods, since each lasts for a dozen requests only.

Fairness is measured with steps that are launched shortly before the one in flight ends (engine/core/launch_delay.py),
and with steps that are launched when it begins; both again with the step times and limits that `quire bench steps`
found for Llama-3.1-8B on an H100, and with steps that take up to 30 % longer, at random.
It is measured on a simulated CPU as well: the demo model, 16 rows, short prompts, one step at a time.
"""

import argparse
import heapq
import itertools
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import msgspec

from benchmarks.simulation import CPU, GPU, H100, NUM_ROWS, Arrival, Machine, Simulation

_FLOOD = 500


def poisson(rate: float, *, seed: int, tenant: str = "load") -> Iterator[Arrival]:
    """Yield an endless load: `rate` requests a second, prompts of 32 to 768 tokens, answers of 16 to 512."""
    rng, at_s, number = random.Random(seed), 0.0, 0
    while True:
        at_s += rng.expovariate(rate)
        yield Arrival(at_s, number, tenant, rng.randint(32, 768), min(16 + int(rng.expovariate(1 / 112)), 512))
        number += 1


def capacity(duration_s: float, *, seed: int) -> float:
    """Return the requests that are answered in a second while there are always more than rows."""
    simulation = Simulation(max_queue_wait_s=None)
    outcomes = simulation.run(poisson(1.0, seed=seed), until_s=duration_s, num_open=2 * NUM_ROWS)
    warm_s = duration_s / 4
    ends = [o.arrival.at_s + o.end_s for o in outcomes if o.end_s is not None]
    return sum(warm_s <= end_s for end_s in ends) / (duration_s - warm_s)


class Overload(msgspec.Struct, kw_only=True):
    """The outcome of a load. Ratios are of the capacity; seconds are from the arrival."""

    max_queue_wait_s: float | None
    requests_per_s: float
    goodput_per_s: float
    goodput_ratio: float
    refused_share: float
    late_share: float  # of the accepted requests: first token after the limit
    ttft_p50_s: float
    ttft_p99_s: float
    refusal_max_s: float  # the longest time from an arrival to its refusal


def overload(
    duration_s: float, *, rate: float, limit_s: float, max_queue_wait_s: float | None, base: float, seed: int
) -> Overload:
    """Send `rate` requests a second. limit_s: of the time to a first token that counts. base: the capacity."""
    simulation = Simulation(max_queue_wait_s=max_queue_wait_s)
    outcomes = simulation.run(poisson(rate, seed=seed), until_s=duration_s)
    counted = [o for o in outcomes if duration_s / 4 <= o.arrival.at_s < duration_s - limit_s]
    span_s = duration_s * 3 / 4 - limit_s
    refusals = [o.refused_s for o in outcomes if o.refused_s is not None]
    times = sorted(o.ttft_s if o.ttft_s is not None else duration_s for o in counted if o.refused_s is None)
    in_time = sum(time_s <= limit_s for time_s in times)
    return Overload(
        max_queue_wait_s=max_queue_wait_s,
        requests_per_s=rate,
        goodput_per_s=in_time / span_s,
        goodput_ratio=in_time / span_s / base,
        refused_share=len(refusals) / len(outcomes),
        late_share=1 - in_time / max(len(times), 1),
        ttft_p50_s=median(times),
        ttft_p99_s=quantiles(times, n=100)[98],
        refusal_max_s=max(refusals, default=0.0),
    )


class Fairness(msgspec.Struct, kw_only=True):
    """The time to the first token of a key's requests, alone and beside another key's 500."""

    alone_p50_s: float
    beside_p50_s: float
    fairness_ratio: float
    alone_p95_s: float
    beside_p95_s: float
    of_the_flood_answered: int


def fairness(duration_s: float, *, seed: int, num_floods: int = 6, machine: Machine = GPU) -> Fairness:
    """Measure one key's requests, one a second, alone and after another key has sent 500 at once."""
    times: tuple[list[float], list[float]] = [], []
    num_prompt, prompts, most = (64, (12, 110), 48) if machine.is_blocking else (512, (32, 768), 224)
    num_answered = 0
    for number, has_flood in itertools.product(range(num_floods), (False, True)):
        rng = random.Random(seed + number)
        guest = [Arrival(1.0 + i + rng.random(), i, "guest", num_prompt, 32) for i in range(int(duration_s) - 1)]
        flood = [
            Arrival(0.0, i, "flood", rng.randint(*prompts), 16 + rng.randint(0, most))
            for i in range(_FLOOD * has_flood)
        ]
        simulation = Simulation(max_queue_wait_s=None, machine=machine)
        outcomes = simulation.run(heapq.merge(flood, guest), until_s=duration_s + 10)
        num_answered += sum(o.arrival.tenant == "flood" and (o.end_s or math.inf) <= duration_s for o in outcomes)
        found = [o.ttft_s for o in outcomes if o.arrival.tenant == "guest" and o.ttft_s is not None]
        times[has_flood].extend(found)
    alone, beside = times
    return Fairness(
        alone_p50_s=median(alone),
        beside_p50_s=median(beside),
        fairness_ratio=median(beside) / median(alone),
        alone_p95_s=quantiles(alone, n=20)[18],
        beside_p95_s=quantiles(beside, n=20)[18],
        of_the_flood_answered=num_answered,
    )


class Report(msgspec.Struct, kw_only=True):
    """All figures of one run."""

    load: float  # multiple of the capacity
    duration_s: float  # simulated
    capacity_per_s: float
    limited: Overload
    unlimited: Overload
    fairness: Fairness
    fairness_launched_at_once: Fairness
    fairness_measured_steps: Fairness  # step times and limits that were measured on an H100
    fairness_measured_steps_launched_at_once: Fairness
    fairness_uneven: Fairness  # steps take up to 30 % longer
    fairness_uneven_launched_at_once: Fairness
    fairness_cpu: Fairness


def measure(*, load: float, limit_s: float, duration_s: float, seed: int = 1, num_floods: int = 6) -> Report:
    """Run all three parts."""
    uneven = GPU._replace(unevenness=0.3)

    def fair(machine: Machine, flood_s: float = 12.0) -> Fairness:
        return fairness(flood_s, seed=seed + 2, num_floods=num_floods, machine=machine)

    base = capacity(duration_s, seed=seed)
    limited, unlimited = (
        overload(duration_s, rate=load * base, limit_s=limit_s, max_queue_wait_s=max_wait_s, base=base, seed=seed + 1)
        for max_wait_s in (limit_s, None)
    )
    return Report(
        load=load,
        duration_s=duration_s,
        capacity_per_s=base,
        limited=limited,
        unlimited=unlimited,
        fairness=fair(GPU),
        fairness_launched_at_once=fair(GPU._replace(delays_launches=False)),
        fairness_measured_steps=fair(H100, 8.0),
        fairness_measured_steps_launched_at_once=fair(H100._replace(delays_launches=False), 8.0),
        fairness_uneven=fair(uneven),
        fairness_uneven_launched_at_once=fair(uneven._replace(delays_launches=False)),
        fairness_cpu=fair(CPU),
    )


def main() -> int:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--load", type=float, default=3.0, help="multiple of the capacity (3)")
    parser.add_argument("--max-queue-wait", type=float, default=2.0, help="seconds to the first token (2)")
    parser.add_argument("--duration", type=float, default=120.0, help="simulated seconds of each load (120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    report = measure(
        load=arguments.load,
        limit_s=arguments.max_queue_wait,
        duration_s=arguments.duration,
        seed=arguments.seed,
    )
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
