"""What a worker says of itself when it joins, as a line. Knows facts by name, and no socket."""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS = {"package": "peralta_zmq", "python": "Python", "torch": "torch",
            "transformers": "transformers"}  # fmt: skip


def worker_info_text(name: str, hello: Mapping[str, str], *, here: Mapping[str, str]) -> str:
    """'generator jetson: cuda:0 (Orin) float16, 6 threads; torch 2.6.0 (here 2.13.0)'.

    Versions are named where they differ from those `here`. The facts are a stranger's: what is
    not there is left out.
    """
    computes = " ".join(hello[fact] for fact in ("device", "dtype") if fact in hello)
    threads = f", threads: {hello['threads']}" if "threads" in hello else ""
    others = [
        f"{label} {hello[fact]} (here {here.get(fact, 'unknown')})"
        for fact, label in VERSIONS.items()
        if fact in hello and hello[fact] != here.get(fact)
    ]
    said = f"generator {name}: {computes or 'device unknown'}{threads}; "
    return "".join(
        each if each.isprintable() else "?"
        for each in said + (", ".join(others) or "versions as here")
    )
