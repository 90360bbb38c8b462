"""Print the dependencies in pyproject.toml, with the extras named as arguments. The Dockerfile installs them."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Read pyproject.toml in the working directory."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
    print("\n".join(sum(extras, project["dependencies"])))


if __name__ == "__main__":
    main()
