"""What arithmetic keeps for scoring, for the other skills that have sums and comparisons in them."""

from benchmarks.demo_model.corpus.topics import is_kept


def keeps_sum(a: int, sign: str, b: int) -> bool:
    """Whether this sum is never to be in training; signs + - x / and * for x. As arithmetic's facts have it."""
    sign = "x" if sign == "*" else sign
    return is_kept(f"{min(a, b)} + {max(a, b)}" if sign == "+" else f"{a} {sign} {b}")


def keeps_comparison(a: int, b: int) -> bool:
    """Whether these two numbers are never to be compared in training, in either order."""
    return is_kept(f"{a} or {b}") or is_kept(f"{b} or {a}")
