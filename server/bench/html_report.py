"""The results as one HTML file that needs no other: figures as tables, latencies and throughput as plots.

What servers answered (names, error messages) is not trusted: it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from server.bench.campaign import Point
from server.bench.records import Record
from server.bench.results import Results
from server.bench.summary import Summary, concurrency_steps
from server.bench.svg_plot import Pair, Plot, Series

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Gap between tokens",
    "e2el": "End-to-end latency",
}
_CDF_POINTS = 200
_BINS = 60
_MIN_MS = 1e-3
"""Tokens that came in one piece are 0 ms apart, which has no place on a logarithmic axis."""


def html_report(results: Results) -> str:
    """`results` has at least one point."""
    colors = _Colors(results.points)
    summaries = [point.summary(results.limits) for point in results.points]
    title = results.flags.label or "Load test"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>intarsia bench serve, {escape(results.started)}; {escape(_described(results))}.</p>",
        _figures_table(results, summaries, colors),
        *_errors(results.points, summaries),
        *_comparisons(results),
        *_section("Over concurrency", _sweep_plots(results.points, summaries, colors), colors.servers_legend()),
        *_section("Latencies, cumulative", _cdf_plots(results.points, colors), colors.legend()),
        *_section("Over time", _timelines(results.points, colors), "<p>Of each point's first round.</p>"),
        "<h2>Options</h2>",
        _table(("flag", "value"), [(name, str(value)) for name, value in sorted(results.options.items())]),
    ]
    return _PAGE.format(title=escape(title), colors=colors.style(), body="\n".join(body))


def _described(results: Results) -> str:
    options = results.options
    text = f"workload {options['workload']}, {options['input_len']} rows in, {options['output_len']} tokens out"
    return "times in ms; " + (
        text if options["workload"] not in ("jsonl", "trace") else f"workload {options['workload']}"
    )


class _Colors:
    """A hue for each server, and for each of its points a lightness, from light to strong as the load rises."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._urls = list(dict.fromkeys(point.server.url for point in points))
        self._points = points

    def of(self, index: int) -> str:
        return f"var(--c{index})"

    def name(self, index: int) -> str:
        point = self._points[index]
        return f"{point.server.url}, {point.label}" if len(self._urls) > 1 else point.label

    def server(self, url: str) -> str:
        """That of the server's last point, its strongest."""
        return self.of(max(index for index, point in enumerate(self._points) if point.server.url == url))

    def legend(self) -> str:
        return _legend((self.name(index), self.of(index)) for index in range(len(self._points)))

    def servers_legend(self) -> str:
        return _legend((url, self.server(url)) for url in self._urls)

    def style(self) -> str:
        light, dark = [], []
        for index, point in enumerate(self._points):
            own = [each for each, other in enumerate(self._points) if other.server.url == point.server.url]
            share = (own.index(index) + 1) / len(own)
            hue = (212, 24)[self._urls.index(point.server.url) % 2]
            light.append(f"--c{index}:hsl({hue} 72% {72 - 32 * share:.0f}%);")
            dark.append(f"--c{index}:hsl({hue} 72% {38 + 30 * share:.0f}%);")
        return f":root{{{''.join(light)}}} @media (prefers-color-scheme:dark){{:root{{{''.join(dark)}}}}}"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    parts = [f"<span>{_swatch(color)} {escape(name)}</span>" for name, color in entries]
    return f'<p class="legend">{"".join(parts)}</p>'


def _swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


# --- tables ---------------------------------------------------------------------------------------------------------


def _figures_table(results: Results, summaries: Sequence[Summary], colors: _Colors) -> str:
    head = ["", "server", "load", "answered", "requests/s", "output tok/s"]
    head += [f"{name.upper()} {which}" for name in LATENCIES for which in ("p50", "p99")]
    head += ["goodput req/s"] if results.limits is not None else []
    rows = []
    for index, (point, summary) in enumerate(zip(results.points, summaries, strict=True)):
        cells = [escape(point.server.url), escape(point.label), f"{summary.num_answered} of {summary.num_sent}"]
        cells += [f"{summary.requests_per_second:.2f}", f"{summary.output_tokens_per_second:,.1f}"]
        for name in LATENCIES:
            values = getattr(summary, name)
            cells += ["–", "–"] if values is None else [f"{values.p50:,.2f}", f"{values.p99:,.2f}"]
        if summary.good is not None:
            cells.append(f"{summary.good / summary.seconds:.2f}")
        rows.append([_swatch(colors.of(index)), *cells])
    return _table(head, rows, is_html=True)


def _errors(points: Sequence[Point], summaries: Sequence[Summary]) -> Iterator[str]:
    rows = [
        (point.server.url, point.label, kind, str(count), summary.error_examples[kind])
        for point, summary in zip(points, summaries, strict=True)
        for kind, count in summary.errors.items()
    ]
    if rows:
        yield "<h2>Errors</h2>"
        yield _table(("server", "load", "kind", "requests", "for example"), rows)


def _comparisons(results: Results) -> Iterator[str]:
    if results.flags.compare is None:
        return
    found = list(results.comparisons())
    yield "<h2>First server over second</h2>"
    yield "<p>Median of the rounds' ratios, in brackets the lowest and the highest.</p>"
    names = [name for name in (found[0] if found else {}) if name not in ("load", "first", "second")]
    rows = [[figures["load"], *(_ratio(figures[name]) for name in names)] for figures in found]
    yield _table(("load", *(name.replace("_", " ") for name in names)), rows)


def _ratio(ratios: dict[str, Any] | None) -> str:
    return "–" if ratios is None else f"{ratios['median']:.3f} ({ratios['lowest']:.3f}–{ratios['highest']:.3f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, is_html: bool = False) -> str:
    """`is_html`: the cells are escaped already."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell if is_html else escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="wide"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


# --- plots ----------------------------------------------------------------------------------------------------------


def _section(title: str, plots: Sequence[Plot], note: str = "") -> Iterator[str]:
    """`note`: HTML."""
    if plots:
        yield f"<h2>{escape(title)}</h2>"
        yield note
        yield '<div class="plots">' + "\n".join(f"<figure>{plot.svg()}</figure>" for plot in plots) + "</div>"


def _sweep_plots(points: Sequence[Point], summaries: Sequence[Summary], colors: _Colors) -> list[Plot]:
    both = [(point, summary) for point, summary in zip(points, summaries, strict=True) if point.concurrency]
    if len({point.concurrency for point, _ in both}) < 2:
        return []
    ticks = sorted({float(point.concurrency or 0) for point, _ in both})
    throughput: list[Series] = []
    latencies: dict[str, list[Series]] = {"ttft": [], "tpot": []}
    for url in dict.fromkeys(point.server.url for point, _ in both):
        own = [(float(point.concurrency or 0), summary) for point, summary in both if point.server.url == url]
        color = colors.server(url)
        rates = [(concurrency, summary.output_tokens_per_second) for concurrency, summary in own]
        throughput.append(Series(url, color, rates, markers=True))
        for name, series in latencies.items():
            for which in ("p50", "p99"):
                found = [(at, getattr(value, which)) for at, each in own if (value := getattr(each, name)) is not None]
                series.append(Series(f"{url}, {which}", color, found, dashed=which == "p99", markers=True))
    plots = [Plot("Throughput", "concurrency", "output tok/s", throughput, x_log=True, x_ticks=ticks)]
    for name, series in latencies.items():
        title = f"{LATENCIES[name]}: p50, and p99 dashed"
        plots.append(Plot(title, "concurrency", "ms", series, x_log=True, x_ticks=ticks))
    return plots


def _cdf_plots(points: Sequence[Point], colors: _Colors) -> list[Plot]:
    plots = []
    for name, title in LATENCIES.items():
        series = []
        for index, point in enumerate(points):
            values = _milliseconds(name, [record for outcome in point.outcomes for record in outcome.records])
            if values:
                series.append(Series(colors.name(index), colors.of(index), _cdf(values)))
        if series:
            plots.append(Plot(title, "ms", "% of values", series, x_log=True, y_high=100.0))
    return plots


def _milliseconds(name: str, records: Sequence[Record]) -> list[float]:
    answered = [record for record in records if record.error is None]
    if name == "itl":
        return [gap * 1e3 for record in answered for gap in record.gaps]
    found = [getattr(record, name) for record in answered]
    return [value * 1e3 for value in found if value is not None]


def _cdf(values: Sequence[float]) -> list[Pair]:
    shares = np.linspace(0.0, 1.0, _CDF_POINTS + 1)
    quantiles = np.maximum(np.quantile(np.asarray(values), shares), _MIN_MS)
    return [(float(value), float(share) * 100) for value, share in zip(quantiles, shares, strict=True)]


def _timelines(points: Sequence[Point], colors: _Colors) -> list[Plot]:
    plots = []
    for index, point in enumerate(points):
        records = point.outcomes[0].records
        zero = min(record.start for record in records)
        name, color = colors.name(index), colors.of(index)
        rate = Series(name, color, token_rate(records, zero))
        plots.append(Plot(f"{name}: throughput", "seconds", "output tok/s", [rate]))
        flight = Series(name, color, in_flight(records, zero))
        plots.append(Plot(f"{name}: in flight", "seconds", "requests", [flight]))
    return plots


def token_rate(records: Sequence[Record], zero: float, bins: int = _BINS) -> list[Pair]:
    """(middle of the interval, tokens a second), over `bins` equal intervals. An event that stood for several tokens
    counts as many as its request's did on average."""
    moments: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.error is None and record.first is not None:
            times = record.first - zero + np.concatenate(([0.0], np.cumsum(record.gaps)))
            moments += times.tolist()
            weights += [record.num_tokens / len(times)] * len(times)
    if not moments:
        return []
    counts, edges = np.histogram(moments, bins=bins, range=(0.0, max(moments) or 1.0), weights=weights)
    width = edges[1] - edges[0]
    return [(float(edge + width / 2), float(count / width)) for edge, count in zip(edges[:-1], counts, strict=True)]


def in_flight(records: Sequence[Record], zero: float, bins: int = _BINS) -> list[Pair]:
    """(middle of the interval, requests in flight on average), over `bins` equal intervals."""
    steps = concurrency_steps(records)
    moments = np.array([moment - zero for moment, _ in steps])
    counts = np.array([count for _, count in steps[:-1]], dtype=float)
    area = np.concatenate(([0.0], np.cumsum(np.diff(moments) * counts)))
    edges = np.linspace(0.0, max(float(moments[-1]), 1e-9), bins + 1)
    means = np.diff(np.interp(edges, moments, area)) / np.diff(edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return [(float(middle), float(mean)) for middle, mean in zip(middles, means, strict=True)]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ color-scheme: light dark; --ink: #1c1c1a; --soft: #6b6a66; --grid: #e4e3df; --page: #fcfcfb; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ecebe7; --soft: #a3a29c; --grid: #383835; --page: #1a1a19; }} }}
{colors}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 1060px; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; }}
.swatch {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; vertical-align: -1px; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: 13px; color: var(--soft); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1.2rem; }}
figure {{ margin: 0; }} svg {{ width: 100%; height: auto; }}
.plot-title {{ font: 600 13px system-ui, sans-serif; fill: var(--ink); }}
.tick, .label {{ font: 11px system-ui, sans-serif; fill: var(--soft); }}
.axis {{ stroke: var(--soft); }} .grid {{ stroke: var(--grid); }}
.line {{ fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }} .marker {{ fill: currentColor; }}
</style></head><body>
{body}
</body></html>
"""
