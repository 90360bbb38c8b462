"""The workloads by name: [(prompt_token_ids, output_len)]. Deterministic: every engine gets the same.

The workload `agent` is not a list, as its prompts hold answers: benchmarks/agents.py.
"""

from random import Random

AGENT = "agent"
NAMES = (
    "single", "batch8", "mixed64", "mixed128", "mixed256", "seed64", "prefill", "prefill16", "long", "longctx",
    "long128k", "repeat", "repeat16", "alone", "prompt512", "eight", "shared", AGENT,
)  # fmt: skip
WITH_PREFIX_CACHE = ("shared", AGENT)  # the others would find their own prompts in it


def workload(name: str, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return the requests of one workload. Raises KeyError for an unknown name, and for `agent`.

    The published figures have seed 0; another one gives other tokens, and other lengths where these are drawn.
    """
    rng = Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randint(0, 9999) for _ in range(n)]

    if name == "single":  # one stream: decode latency
        return [(tokens(128), 512)]
    if name == "batch8":
        return [(tokens(512), 256) for _ in range(8)]
    if name == "mixed256":  # the field's usual small bench: 256 requests, in and out uniform in 100…1024
        return [(tokens(rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]
    if name in ("mixed64", "mixed128"):  # the first of them
        return [(tokens(rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(int(name[5:]))]
    if name == "seed64":  # 64 at a time (max_num_seqs 64), about 180k tokens generated
        return [(tokens(32), 720) for _ in range(256)]
    if name == "prefill":  # 64 prompts of 4,096 tokens, one token out
        return [(tokens(4096), 1) for _ in range(64)]
    if name == "prefill16":
        return [(tokens(4096), 1) for _ in range(16)]
    if name == "long":  # 4 long prompts
        return [(tokens(30_000), 128) for _ in range(4)]
    if name == "longctx":
        return [(tokens(16_000), 256) for _ in range(16)]
    if name == "long128k":  # one context of 128k
        return [(tokens(130_816), 256)]
    if name == "alone":  # the next three: what two cores of a CPU compute in seconds
        return [(tokens(128), 64)]
    if name == "prompt512":
        return [(tokens(512), 1)]
    if name == "eight":
        return [(tokens(128), 32) for _ in range(8)]
    if name == "repeat":  # a repeating text, which the answer may continue: for speculation
        return [(_rounds(tokens(32), 512), 256)]
    if name == "repeat16":
        return [(_rounds(tokens(rng.randint(16, 64)), 512), 256) for _ in range(16)]
    if name == "shared":  # a long system prompt; it is in the prefix cache, as is all of each prompt
        system = tokens(2048)
        return [(system + tokens(128), 128) for _ in range(256)]
    raise KeyError(name)


def _rounds(phrase: list[int], length: int) -> list[int]:
    return (phrase * (length // len(phrase) + 1))[:length]
