"""How long to fuzz, and the corpus. Each file of it is tried by name; hypothesis goes on from there."""

from pathlib import Path

from hypothesis import HealthCheck, settings

CORPUS = Path(__file__).parent / "corpus"

for name, max_examples in (("fuzz", 1000), ("long", 50_000)):
    settings.register_profile(
        name, max_examples=max_examples, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )


def seeds(kind: str) -> list[Path]:
    """Return the corpus's files of one kind, in order."""
    found = sorted(path for path in (CORPUS / kind).iterdir())
    assert found
    return found
