"""`lab doctor`: check whether this machine is fit to train."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from basics.errors import FAILED


@click.command()
@click.argument("run", required=False)
@click.option("--online", "is_online", is_flag=True,
              help="Ask the Hugging Face hub for an answer and for what its token may do, also"
                   " where the run needs no download.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option("--time-limit", type=click.FloatRange(min=1, max=600), default=25.0,
              show_default=True, metavar="SECONDS",
              help="For the tests that load the GPUs and exchange data between them.")
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(**options: Any) -> None:
    """Check whether this machine is fit to train, and to train RUN if one is named.

    Looks at GPUs, driver, PyTorch, disks, memory, limits, and at the run's configs, dataset and
    sizes; loads each GPU for a moment and adds up numbers over all of them. Beside a training it
    leaves these tests out. Exit status 1 if training would fail, 0 otherwise. On several machines:
    torchrun ... -m lab doctor RUN, as the training is started.
    """
    from lab.doctor.examination import Request, examine_here
    from lab.doctor.report import Report, as_document, is_fit, print_report

    request = Request(**options)

    def show(reports: list[Report]) -> int:
        if request.as_json:
            from basics.cli import print_json

            print_json(as_document(reports, request.run))
        else:
            print_report(reports, request.run)
        return 0 if is_fit(reports) else FAILED

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from lab.doctor.nodes import examine_nodes  # imports torch

        sys.exit(examine_nodes(request, show))
    sys.exit(show(examine_here(request)))
