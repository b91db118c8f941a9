"""A report is JSON: the machine, the command, every sample. Tables and Markdown are made from it and from nothing else.

    traffic hidden = 1 - (t - t_no_traffic) / (t_default - t_no_traffic)

with the medians of this variant, and of Megatron's default schedule with and without traffic, in the same group.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from combined_1f1b.bench import host_cost_table
from combined_1f1b.bench.options import BUILT_IN, DEFAULT, Group, Variant
from combined_1f1b.bench.summary import Summary, summarize
from combined_1f1b.errors import ConfigError

FORMAT = 1
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant, with what follows from its samples and its group's.

    Attributes:
        seconds: None when it did not run. hidden: None where it has no meaning.
        to_default, to_built_in: ratios of medians to those rows with the same traffic; to the built-in that delays its
            weight gradients like this one, if there is one.
    """

    name: str
    variant: Variant
    data: Mapping[str, Any]
    seconds: Summary | None
    host: Summary | None
    to_default: float | None
    to_built_in: float | None
    hidden: float | None


def tables_of(report: Report) -> list[tuple[Group, list[Row]]]:
    """The report's groups with their rows, in the order in which they were measured."""
    has_traffic = report["link"]["kind"] != "none"
    names = ("mode", "layers", "data_parallel")
    return [
        (Group(**{name: data[name] for name in names}), _rows(data, has_traffic=has_traffic))
        for data in report["groups"]
    ]


def _rows(data: Mapping[str, Any], *, has_traffic: bool) -> list[Row]:
    entries = [(variant_of(entry), entry) for entry in data["variants"]]
    medians = {variant: summarize(entry["seconds"]).median for variant, entry in entries if entry["seconds"]}
    reference = entries[0][0]

    def median_of(schedule: str, *, traffic: bool, delay_wgrad: bool = False) -> float | None:
        return medians.get(dataclasses.replace(reference, schedule=schedule, traffic=traffic, delay_wgrad=delay_wgrad))

    default, quiet = (median_of(DEFAULT, traffic=traffic) for traffic in (True, False))
    rows = []
    for variant, entry in entries:
        median = medians.get(variant)
        hidden = None
        if (
            has_traffic
            and median is not None
            and variant.traffic
            and default is not None
            and quiet is not None
            and default > quiet
        ):
            hidden = 1 - (median - quiet) / (default - quiet)
        rows.append(
            Row(
                name=variant.name,
                variant=variant,
                data=entry,
                seconds=summarize(entry["seconds"]) if entry["seconds"] else None,
                host=summarize(entry["host_seconds"]) if entry["host_seconds"] else None,
                to_default=_ratio(median, median_of(DEFAULT, traffic=variant.traffic)),
                to_built_in=_ratio(
                    median,
                    median_of(BUILT_IN, traffic=variant.traffic, delay_wgrad=variant.delay_wgrad)
                    or median_of(BUILT_IN, traffic=variant.traffic),
                ),
                hidden=hidden,
            )
        )
    return rows


def variant_of(entry: Mapping[str, Any]) -> Variant:
    """The variant that an entry of a report's group is of."""
    names = ("schedule", "wrapper", "delay_wgrad", "traffic")
    return Variant(**{name: entry[name] for name in names})


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other


HEADINGS = (
    "schedule", "traffic", "step ms", "min", "max", "median lies in", "/ default", "/ built-in", "hidden",
    "exposed ms", "blocking ms", "host ms", "allocated GiB", "reserved GiB", "losses", "gradients",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table, under HEADINGS."""
    traffic = "yes" if row.variant.traffic else "no"
    if row.seconds is None or row.host is None:
        return (row.name, traffic, "does not run", *[""] * (len(HEADINGS) - 3))
    seconds, shares = row.seconds, row.data["traffic_shares"] or {}
    losses, gradients = (row.data[f"{kind}_compared"] for kind in ("losses", "gradients"))
    return (
        row.name,
        traffic,
        _milliseconds(seconds.median),
        _milliseconds(seconds.minimum),
        _milliseconds(seconds.maximum),
        f"{_milliseconds(seconds.low)} to {_milliseconds(seconds.high)}",
        _number(row.to_default),
        _number(row.to_built_in),
        "" if row.hidden is None else f"{100 * row.hidden:.1f}%",
        _milliseconds(shares.get("exposed")),
        _milliseconds(shares.get("blocking")),
        _milliseconds(row.host.median),
        _gibibytes(row.data["peak_allocated"]),
        _gibibytes(row.data["peak_reserved"]),
        _compared(losses),
        _compared(gradients),
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f}" if count else ""


def _compared(answer: str) -> str:
    return {"equal": "bitwise equal", "different": "DIFFERENT", "": "not compared"}.get(answer, answer)


def remarks(report: Report) -> Iterable[str]:
    """What the tables have no room for."""
    link = report["link"]
    yield f"Link: {link['description']}."
    if not link["early_frees"]:
        yield (
            "With one rank an all-to-all's output may be its input, so the built-in's early frees of inputs are off: "
            "with several ranks it would need less memory."
        )
    tables = tables_of(report)
    summaries = [row.seconds for _, rows in tables for row in rows if row.seconds is not None]
    if summaries:
        yield (
            f"{min(summary.count for summary in summaries)} samples of each variant, in turn. The median lies in the "
            f"interval shown with a confidence of at least {100 * min(item.confidence for item in summaries):.0f}%, "
            "whatever the distribution."
        )
    for group, rows in tables:
        for row in rows:
            if row.data["refused"]:
                quiet = "" if row.variant.traffic else ", no traffic"
                yield f"{group.name}: {row.name}{quiet} does not run: {row.data['refused']}."


def print_report(report: Report) -> None:
    """Print a table for each group, or that of a layer pair's host cost."""
    if "seconds_per_pair" in report:
        host_cost_table.print_host_cost(report)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=230)
    for group, rows in tables_of(report):
        table = Table(title=group.name, title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
    for remark in remarks(report):
        console.print(remark)


def to_markdown(reports: Iterable[Report]) -> str:
    """Reports as Markdown, one section each: machine, command, tables."""
    lines: list[str] = []
    for report in reports:
        section = _host_cost_section if "seconds_per_pair" in report else _section
        lines += [*section(report), ""]
    return "\n".join(lines)


def _section(report: Report) -> Iterable[str]:
    size = report["options"]["size"]
    yield from (f"## {report['options']['preset']} model, {report['link']['kind']} link", "", *_origin(report))
    yield "- " + ", ".join(f"{name} {value}" for name, value in size.items())
    yield from (f"- {remark}" for remark in remarks(report))
    for group, rows in tables_of(report):
        yield from ("", f"### {group.name}", "", *_table(HEADINGS, (cells(row) for row in rows)))


def _host_cost_section(report: Report) -> Iterable[str]:
    yield from ("## Host cost of a layer pair", "", *_origin(report), f"- {host_cost_table.verdict(report)}", "")
    yield from _table(host_cost_table.HEADINGS, host_cost_table.host_cost_rows(report))


def _origin(report: Report) -> Iterable[str]:
    machine, versions = report["machine"], report["versions"]
    ranks = f"{machine['ranks']} rank{'s' if machine['ranks'] > 1 else ''}"
    yield f"- {report['date']}, {ranks} on {machine['device']}, {machine['cpu_cores']} CPU cores"
    yield "- " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield f"- `{report['command']}`"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield from (_line(headings), _line(["---", *["---:"] * (len(headings) - 1)]))
    yield from map(_line, rows)


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def write_markdown(path: Path, reports: Iterable[Report]) -> None:
    """Write the reports between the two marker lines of a Markdown file; a file without them, or a new one, gets them.

    Raises:
        ConfigError: the file cannot be written.
    """
    body = f"{BEGIN}\n\n{to_markdown(reports)}\n{END}"
    text = path.read_text() if path.exists() else "# Benchmarks\n"
    if BEGIN in text and END in text:
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        text = before + body + after
    else:
        text = f"{text.rstrip()}\n\n{body}\n"
    write(path, text)


def write(path: Path, text: str) -> None:
    """Write a file and its folders.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ConfigError: no such file, or not a report of this format.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError.of("--from", str(path), f"cannot be read ({error})", "name a report of bench") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ConfigError.of("--from", str(path), f"not a report of format {FORMAT}", "measure it again")
    return report
