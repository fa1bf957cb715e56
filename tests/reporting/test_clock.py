import pytest

from reporting.clock import PhaseClock


def test_time_is_booked_to_its_phase(now):
    clock = PhaseClock(since=90.0)
    now.seconds = 102.0
    clock.enter("training")
    now.seconds = 110.0
    with clock.phase("validation") as validation:
        now.seconds = 115.0
        with clock.phase("waiting"):
            now.seconds = 116.0
    now.seconds = 120.0
    seconds = clock.read()
    assert validation.seconds == seconds["validation"] == clock.longest["validation"] == 5
    assert (seconds["startup"], seconds["training"], seconds["waiting"]) == (12, 12, 1)
    assert sum(seconds.values()) == 30


def test_some_of_the_training_can_be_booked_to_another_phase(now):
    clock = PhaseClock()
    clock.enter("training")
    now.seconds += 10
    clock.count_diagnostics(4.0)
    assert (clock.read()["training"], clock.read()["diagnostics"]) == (6, 4)
    clock.count_diagnostics(7.0)  # more than there is: part was in another phase
    assert (clock.read()["training"], clock.read()["diagnostics"]) == (0, 10)


@pytest.mark.parametrize(("at_checkpoint", "recorded", "price", "says", "usd"), [
    # US$ of the checkpoint's hour; hours and US$ of all launches; after half an hour more: US$ of
    # training, and of what is lost
    (10.0, (1.0, 10.0), 40.0, "", (30.0, 0.0)),
    (10.0, (1.5, 16.0), 40.0, "", (30.0, 6.0)),
    (None, (1.5, 0.0), 40.0, "1.5 hours are counted at US$40.00 an hour too", (60.0, 20.0)),
    (None, (1.5, 15.0), 40.0, "", (30.0, 5.0)),  # the price came after the checkpoint
    (10.0, (1.0, 10.0), None, "at that of the earlier ones, US$10.00 an hour", (15.0, 0.0)),
])
def test_all_launches_have_a_price(now, at_checkpoint, recorded, price, says, usd):
    clock = PhaseClock()
    clock.resume({"training": 3600.0}, {} if at_checkpoint is None else {"training": at_checkpoint})
    clock.count_lost(recorded[0] * 3600, recorded[1])
    line = clock.set_price(price)
    assert says in line and bool(says) == bool(line)
    with clock.phase("training"):
        now.seconds += 1800
    assert clock.read()["training"] == 5400 and clock.read_this_launch()["training"] == 1800
    assert (clock.usd()["training"], clock.usd()["lost"]) == pytest.approx(usd)


def test_time_that_only_a_heartbeat_tells_is_lost_and_has_the_present_price(now):
    clock = PhaseClock()
    clock.resume({"training": 3600.0}, {"training": 10.0})
    clock.count_lost(3600.0, 10.0)
    clock.set_price(40.0)
    clock.count_lost(5400.0)
    now.seconds += 10
    assert clock.read()["lost"] == 1800 and clock.usd()["lost"] == 20
    assert clock.total_seconds() == 5410 == sum(clock.read().values())


def test_dollars_without_seconds_in_damaged_records_are_lost(now):
    clock = PhaseClock()
    clock.count_lost(0.0, 5.0)
    clock.set_price(1.0)
    assert clock.usd()["lost"] == 5.0


def test_without_any_price_there_are_no_dollars(now):
    assert PhaseClock().usd() == {}


def test_the_launchers_seconds_are_counted_once(now, monkeypatch):
    monkeypatch.setenv("DDP_TRAIN_SPENT_SECONDS", "")
    starter = PhaseClock()
    with starter.phase("download"):
        now.seconds += 60
    now.seconds += 3
    starter.export_to_children()
    worker = PhaseClock()
    worker.import_from_parent()
    assert worker.read()["download"] == 60 and worker.read()["startup"] == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = PhaseClock()
    restarted.import_from_parent()
    assert restarted.read()["download"] == 0
