"""Whether a link can carry a run's weights. Pure functions; knows numbers only."""

from __future__ import annotations


def transfer_seconds(bytes_per_version: float, megabytes_per_second: float) -> float:
    """Seconds that one version spends on the link."""
    return bytes_per_version / (megabytes_per_second * 1e6)


def link_verdict(
    bytes_per_version: float, megabytes_per_second: float, step_seconds: float
) -> str | None:
    """What to tell the person when versions come faster than the link carries them, else None."""
    takes = transfer_seconds(bytes_per_version, megabytes_per_second)
    if takes <= step_seconds:
        return None
    return (
        f"this link cannot keep up: a version of {bytes_per_version / 1e6:.1f} MB takes "
        f"{takes:.1f} s at {megabytes_per_second:.2f} MB/s, a step {step_seconds:.1f} s; this "
        f"generator serves about every {-(-takes // step_seconds):.0f}th version"
    )
