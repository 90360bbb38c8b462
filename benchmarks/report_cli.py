"""`quire bench report`, and the output of all bench commands: plots, a page, a comparison.

matplotlib is imported only to draw. Never imports torch.
"""

import argparse
from collections.abc import Sequence

from benchmarks.compare import compare
from benchmarks.report import BenchError, Report, check_outputs, load_json
from benchmarks.saved import Source, read_sources, to_source


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench report` and return its exit code. Raises BenchError."""
    if not (arguments.html or arguments.plot):
        raise BenchError("Say where to draw: --html FILE, --png FILE or both.", exit_code=2)
    check_outputs(json_path=None, plot_path=arguments.plot, html_path=arguments.html)
    _draw(read_sources(arguments.files), plot_path=arguments.plot, html_path=arguments.html)
    return 0


def read_old(path: str, kind: str) -> Source:
    """Read the report that --compare names, one of `quire bench KIND`. Raises BenchError."""
    try:
        old = to_source(load_json(path), "before", path)
    except BenchError as error:
        raise BenchError(f"--compare {error}", exit_code=2) from error
    if old.kind != kind:
        raise BenchError(f"--compare {path} is not a report of quire bench {kind}.", exit_code=2)
    return old


def show(report: Report, old: Source | None, arguments: argparse.Namespace) -> None:
    """Print the changes since the old report, and draw both as the flags ask. Raises BenchError."""
    new = to_source(report, "now", "the new report")
    sources = [new] if old is None else [old, new]
    if old is not None:
        print(f"\n{compare(old.report, report)}", flush=True)
    _draw(sources, plot_path=arguments.plot, html_path=arguments.html)


def _draw(sources: Sequence[Source], *, plot_path: str | None, html_path: str | None) -> None:
    if not (plot_path or html_path):
        return
    from benchmarks.page import write_page
    from benchmarks.plots import write_picture
    from benchmarks.plots_choice import choose_plots, headline

    plots, remarks = choose_plots(sources)
    if html_path:
        write_page(html_path, headline(sources), plots, remarks, sources)
    if plot_path and not plots:
        raise BenchError(
            f"--plot {plot_path}: there is nothing to draw: {' '.join(remarks) or 'nothing was measured.'}"
        )
    if plot_path:
        write_picture(plot_path, headline(sources), plots)
