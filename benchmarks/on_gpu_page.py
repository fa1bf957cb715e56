"""The page of `on_gpu.py`, made from what there is: a missing field or row is shown as such."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.on_gpu_stages import ENVIRONMENT, ORIGINAL, Stage, read_rows
from lab.plan.setting import GPT2_SMALL
from reporting.speed import find_gpu, flops_per_token

TOKENS = 3_260_190_720  # of the original's run
MISSING = "-"
Values = dict[str, Any]


def page(setup: Values, results: dict[str, Values], table: list[Stage], output: Path) -> str:
    """Return the page as Markdown.

    Args:
        setup: device, dry_run and usd_per_hour.
        results: by the stages' names.
        output: with the rows of `throughput.py` and `cross_entropy.py`.
    """
    speed = SpeedTable(setup.get("usd_per_hour"), read_rows(output / "peers.jsonl"))
    parts = [["# Measurements on a GPU" + (" (a dry run: no figure means anything)"
                                           if setup.get("dry_run") else ""), "",
              f"Made by `python -m benchmarks.on_gpu`, last stage {last_end(results)}."],
             environment(results.get(ENVIRONMENT, {}).get("values", {}))]
    for stage in (one for one in table if one.name != ENVIRONMENT):
        found = results.get(stage.name, {})
        lines = section(stage, found.get("values") or {}, output, speed)
        if found or lines:
            parts.append([f"## {stage.title}", "", *state(found), *lines])
    parts += [failures(results), not_run(results, table)]
    return "\n\n".join("\n".join(lines).strip() for lines in parts if lines) + "\n"


def last_end(results: dict[str, Values]) -> str:
    return max((one.get("ended", "") for one in results.values()), default="") or "none"


def environment(values: Values) -> list[str]:
    """Format the machine and its software."""
    shown = ("gpu", "gpu_gib", "gpus", "driver", "cuda", "cudnn", "nccl", "triton", "python",
             "platform", "cpu_cores", "commit", "missing", "missing_for_tests",
             "missing_for_other_commands")
    rows = [[name.replace("_", " "), text_of(values[name])] for name in shown if name in values]
    rows += [[name, version or "missing"] for name, version
             in values.get("packages", {}).items()]
    return ["## Environment", "", *(pipe(rows, ["", ""]) if rows else ["Not read."])]


def state(found: Values) -> list[str]:
    """Say in a line on which machine a stage ran, for how long, and what became of it."""
    if not found:
        return ["Begun, not ended.", ""]
    because = f" ({found['reason']})" if found.get("reason") else ""
    place = f" on {found['machine']}" if found.get("machine") else ""
    return [f"{found.get('status', MISSING).capitalize()}{because}, {found.get('seconds', 0):.0f}"
            f" s{place}.", ""]


def section(stage: Stage, values: Values, output: Path, speed: SpeedTable) -> list[str]:
    """Format the results of one stage; nothing if there are none."""
    if stage.rows:
        rows = read_rows(output / f"{stage.name}.jsonl")
        return speed.lines(rows, stage.rows) if rows else []
    if stage.name in FORMATS:
        return FORMATS[stage.name](values) if values else []
    return forms(read_rows(output / f"{stage.name}.jsonl"))


class SpeedTable:
    """Formats rows of `throughput.py`.

    Args:
        usd_per_hour: the machine's price, if it is known.
        peers: the rows among which the original's way is looked for.
    """

    def __init__(self, usd_per_hour: float | None, peers: list[Values]) -> None:
        self.usd_per_hour, self.peers = usd_per_hour, peers

    def lines(self, rows: list[Values], wanted: Iterable[str]) -> list[str]:
        """Format measurements, the median of each row, by device; and the rows that are missing."""
        heads = ["", "microbatch", "precision", "compiled", "tokens/s", "MFU", "/ original",
                 "peak MiB", "compiling, s", "rounds"]
        if self.usd_per_hour:
            heads.append("US$ (computed)")
        lines = []
        for device in dict.fromkeys(map(device_of, rows)):
            on_it = [row for row in rows if device_of(row) == device]
            names = dict.fromkeys([*wanted, *(str(row.get("row")) for row in on_it
                                              if "ceiling_flops" not in row)])
            cells = [self._cells(name, [row for row in on_it if row.get("row") == name])
                     for name in names]
            lines += ["", f"{device}:", "", *pipe(cells, heads), *ceilings(on_it)]
        if self.usd_per_hour:
            lines += ["", f"US$: computed from tokens/s, for {TOKENS:,} training tokens at"
                      f" US${self.usd_per_hour:,.2f} an hour; no validation, no start-up."]
        return lines[1:]

    def _cells(self, name: str, rows: list[Values]) -> list[str]:
        good = [row for row in rows if row.get("status", "ok") == "ok"]
        num_columns = 8 + bool(self.usd_per_hour)
        if not good:
            reason = next((row.get("reason") for row in rows if row.get("reason")), None)
            because = f"failed: {shortened(reason or 'no reason given')}" if rows else (
                "not measured")
            return [name, because, *[MISSING] * num_columns]
        first, rate = good[0], rate_of(good, name)
        original = rate_of([row for row in self.peers if device_of(row) == device_of(first)],
                           ORIGINAL)
        cells = [name, text_of(first.get("microbatch_size")), text_of(first.get("precision")),
                 text_of(first.get("is_compiled")), number(rate), mfu(first, rate),
                 f"{rate / original:.2f}" if rate and original else MISSING,
                 number(first.get("peak_mib")),
                 number(first.get("compile_seconds")), str(len(good))]
        if self.usd_per_hour:
            cells.append(f"{TOKENS / rate / 3600 * self.usd_per_hour:,.2f}" if rate else MISSING)
        return cells


def rate_of(rows: list[Values], name: str) -> float | None:
    """Return the median tokens per second of a row, over its rounds."""
    rates = [row["tokens_per_second"] for row in rows if row.get("row") == name
             and isinstance(row.get("tokens_per_second"), int | float)]
    return statistics.median(rates) if rates else None


def mfu(row: Values, rate: float | None) -> str:
    """Return the share of the GPU's peak; unknown GPUs have none."""
    gpu = find_gpu(device_of(row))
    if gpu is None or not rate:
        return MISSING
    flops = row.get("flops_per_token") or flops_per_token(GPT2_SMALL)
    return f"{rate * flops / gpu.peak(row.get('precision')):.1%}"


def device_of(row: Values) -> str:
    machine = row.get("machine")
    return str(machine.get("device") if isinstance(machine, dict) else machine or "unknown device")


def ceilings(rows: list[Values]) -> list[str]:
    """Say how fast one large matrix product was on this device, if that was measured."""
    found = next((row["ceiling_flops"] for row in rows if row.get("ceiling_flops")), {})
    rates = ", ".join(f"{name} {rate / 1e12:,.3g} TFLOP/s" for name, rate in found.items())
    return ["", f"One large matrix product: {rates}."] if rates else []


def tests(values: Values) -> list[str]:
    counts = ", ".join(f"{values[key]} {key}" for key in (
        "collected", "passed", "failed", "error", "skipped") if values.get(key) is not None)
    return [counts or "no outcome", *(f"- `{name}`" for name in values.get("names", []))]


def kernels(values: Values) -> list[str]:
    rows = [[one.get("group"), number(one.get("ms"), 2), f"{one.get('share', 0):.1%}",
             number(one.get("launches"))] for one in values.get("groups", [])]
    return [f"A step takes {number(values.get('step_ms'), 2)} ms, its kernels"
            f" {number(values.get('kernel_ms'), 2)} ms; microbatch"
            f" {text_of(values.get('microbatch_size'))}, attention:"
            f" {text_of(values.get('attention_kernel'))}.", "",
            *pipe(rows, ["kernels", "ms a step", "share", "launches a step"])]


def search(values: Values) -> list[str]:
    """Set the search beside what `lab plan` expects, whose activations are those of eager code."""
    rows = [["largest microbatch", text_of(values.get("largest")),
             text_of(values.get("planned_largest"))],
            ["GiB without sequences", number(values.get("fixed_gib"), 2),
             number(values.get("planned_fixed_gib"), 2)],
            ["GiB a sequence", number(values.get("gib_a_sequence"), 3),
             number(values.get("planned_gib_a_sequence"), 3)],
            ["fastest microbatch", text_of(values.get("fastest")), MISSING],
            ["seconds", number(values.get("seconds")), MISSING],
            ["trials", text_of(values.get("trials")), MISSING]]
    return pipe(rows, ["", "measured", "`lab plan` (activations as in eager code)"])


def precision(values: Values) -> list[str]:
    """List the losses of both runs beside one another."""
    bf16, fp32 = values.get("bf16", []), values.get("fp32", [])
    rows = [[str(number_of + 1), *(number(losses[number_of], 5) if number_of < len(losses)
                                   else MISSING for losses in (bf16, fp32))]
            for number_of in range(max(len(bf16), len(fp32)))]
    return [*pipe(rows, ["report", "bf16", "fp32"]), "",
            f"Largest difference: {number(values.get('largest_difference'), 5)}."]


def repeat(values: Values) -> list[str]:
    """Say whether weights are equal; on CUDA a difference is a result, not a failure."""
    rows = [[title, {True: "equal", False: "different"}.get(values.get(f"{key}_is_equal"), MISSING),
             scientific(values.get(f"{key}_largest_difference")),
             scientific(values.get(f"{key}_loss_difference"))]
            for key, title in (("again", "the same run again"), ("parts", "stopped and resumed"))]
    return pipe(rows, ["beside the first run", "weights, bit for bit", "largest difference",
                       "difference of the last loss"])


def generic_values(values: Values) -> list[str]:
    return pipe([[key.replace("_", " "), text_of(value)] for key, value in values.items()],
                ["", ""])


FORMATS: dict[str, Callable[[Values], list[str]]] = {
    "tests": tests, "ours-kernels": kernels, "search": search, "numbers-precision": precision,
    "numbers-repeat": repeat, "around-checkpoint": generic_values, "around-run": generic_values,
}


def forms(rows: list[Values]) -> list[str]:
    """Format the lines of `cross_entropy.py`, the median of each form's rounds."""
    found: dict[str, Values] = {}
    for row in rows:
        form = found.setdefault(str(row.get("form")), {"times": []})
        if "round" in row:
            form["times"].append(row.get("ms"))
        else:
            form.update(row)
    cells = []
    for name, form in found.items():
        times = [one for one in form["times"] if isinstance(one, int | float)]
        cells.append([name, number(statistics.median(times) if times else form.get("ms"), 2),
                      number(form.get("peak MiB")), number(form.get("loss"), 4),
                      text_of(form.get("error"))])
    return pipe(cells, ["form", "ms", "adds MiB", "loss", "failed"]) if cells else []


def failures(results: dict[str, Values]) -> list[str]:
    """List what failed, with its last lines."""
    lines = []
    for name, found in results.items():
        if found.get("status") not in ("done", "partial"):
            lines += ["", f"{name}: {found.get('status')}, {found.get('reason')}", "", "```text",
                      *(line.replace("```", "'''") for line in found.get("tail", [])[-15:]), "```"]
    return ["## What failed", *lines] if lines else []


def not_run(results: dict[str, Values], table: list[Stage]) -> list[str]:
    names = [stage.name for stage in table if stage.name not in results]
    partial = [name for name, found in results.items() if found.get("status") == "partial"]
    return ["## What has not run", "", f"Not begun: {', '.join(names) or 'none'}. Begun, to be"
            f" continued: {', '.join(partial) or 'none'}."]


def number(value: Any, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else MISSING


def scientific(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, int | float) else MISSING


def text_of(value: Any) -> str:
    """Return a value as text that fits into a table's cell."""
    if value is None or value == []:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return shortened(str(value))


def shortened(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def pipe(rows: list[list[str]], heads: list[str]) -> list[str]:
    return tabulate(rows, heads, tablefmt="pipe", disable_numparse=True).splitlines()
