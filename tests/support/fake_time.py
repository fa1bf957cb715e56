"""A clock that moves only if a test moves it."""


class FakeTime:
    """Replaces `time.perf_counter`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
