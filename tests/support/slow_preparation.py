"""Run prepare_dataset.py with small tasks, slowly, or with a worker that dies.

Small tasks make it use worker processes for a small corpus. The environment variable PAUSE_SECONDS
holds a pause after each shard, in which a test can stop the command; if WORKER_DIES is set, each
worker exits at its first task.
"""

import os
import time

import prepare_dataset
from preparation import encoding, pipeline, reading

COMMAND = ["-m", "tests.support.slow_preparation"]  # arguments of Python, in the project directory


def die(*_: object) -> None:
    os._exit(9)


def main() -> None:
    pipeline.TASK_BYTES = reading.TASK_BYTES = 2**16
    end_shard = pipeline._Preparation._end_shard

    def slow_end_shard(preparation: pipeline._Preparation, number: int) -> None:
        end_shard(preparation, number)
        time.sleep(float(os.environ.get("PAUSE_SECONDS", "0")))

    pipeline._Preparation._end_shard = slow_end_shard
    if "WORKER_DIES" in os.environ:
        encoding.encode_task = die
    prepare_dataset.run()


if __name__ == "__main__":
    main()
