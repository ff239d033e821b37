"""Whether a device is cool and charged enough to be measured on; waiting until it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.config.settings import HealthConfig
    from farm.devices.status import DeviceStatus
    from farm.devices.transport import Transport

# A case cools down by a degree in half a minute.
POLL_SECONDS = 5.0


def check(status: DeviceStatus, limits: HealthConfig) -> str:
    """Return what speaks against measuring now, empty when nothing does. What a device does not tell does not. Pure."""
    problems = []
    if status.temperature_c is not None and status.temperature_c > limits.max_temperature_c:
        problems.append(f"at {status.temperature_c:.1f} C, limit {limits.max_temperature_c:.1f} C")
    if status.battery_percent is not None and status.battery_percent < limits.min_battery_percent:
        problems.append(f"at {status.battery_percent} % of battery, at least {limits.min_battery_percent} %")
    return " and ".join(problems)


def wait_until_cool(
    transport: Transport,
    os: Literal["android", "linux"],
    limits: HealthConfig,
    sleep: Callable[[float], None],
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until nothing speaks against measuring, at most `limits.gate_wait_s`, and return a note for the result.

    The note is empty when there was nothing to wait for. `sleep` takes seconds and may return early; `stop` is asked
    after it. Raises DeviceError.
    """
    from farm.devices.status import read_status

    waited = 0.0
    first = problem = check(read_status(transport, os=os), limits)
    while problem and waited < limits.gate_wait_s and not stop():
        pause = min(POLL_SECONDS, limits.gate_wait_s - waited)
        sleep(pause)
        waited += pause
        problem = check(read_status(transport, os=os), limits)
    if problem:
        return f"measured {problem}, after waiting {waited:.0f} s"
    return f"waited {waited:.0f} s before measuring: it was {first}" if first else ""
