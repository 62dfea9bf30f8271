"""Steps begin late, but never so that the device has a pause: against a device that is a number of seconds."""

import numpy as np
import pytest

from rimuru_jax.server import late_start
from rimuru_jax.server.late_start import MARGIN, LateStart


class Device:
    """Runs steps one after another on a clock of its own, and adds up how long it had nothing to do."""

    def __init__(self, host: float) -> None:
        self.now, self.host, self.free, self.idle = 0.0, host, 0.0, 0.0
        self.begins: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def busy(self) -> bool:
        return self.now < self.free

    def step(self, start: LateStart, seconds: float) -> None:
        """As the engine: hold, plan and run this step, wait for the one before it."""
        start.hold(self.busy)
        self.begins.append(self.now)
        self.now += self.host
        before, self.idle = self.free, self.idle + max(0.0, self.now - self.free)
        self.free = max(self.free, self.now) + seconds
        start.observe(max(0.0, before - self.now))
        self.now = max(self.now, before)


@pytest.fixture
def device(monkeypatch) -> Device:
    one = Device(host=0.002)
    monkeypatch.setattr(late_start, "time", one)
    return one


def test_steps_begin_just_before_they_would_be_late(device):
    start, rng = LateStart(), np.random.default_rng(0)
    for number in range(200):
        prefill = rng.random() < 0.3
        device.step(start, 0.025 if prefill else 0.017)
        if number == 20:
            device.idle = 0.0
    assert device.idle == 0.0
    assert start.seconds == pytest.approx(0.017 - device.host - MARGIN, abs=1e-6)


def test_short_steps_begin_at_once(device):
    start = LateStart()
    for _ in range(50):
        device.step(start, 0.004)
    assert start.seconds == 0.0 and device.idle < 0.003  # before the first


def test_a_device_that_becomes_faster_has_few_pauses(device):
    """As when most requests end: what was learned from long steps costs a look each time, not their length."""
    start = LateStart()
    for _ in range(50):
        device.step(start, 0.030)
    assert start.seconds > 0.02
    device.idle = 0.0
    for _ in range(100):
        device.step(start, 0.005)
    assert start.seconds == 0.0 and device.idle < 3 * (device.host + 0.0005)


def test_nothing_is_held_for_an_idle_device(device):
    start = LateStart()
    for _ in range(50):
        device.step(start, 0.030)
    device.now = device.free + 1.0
    before = device.now
    start.hold(device.busy)
    assert device.now == before
    start.observe(None)
    assert start.seconds > 0.02, "a step without one before it says nothing"
