"""Coverage-guided fuzzing of all decoders: `make fuzz SECONDS=60`.

Only WireError and CorruptError may be raised; no decoded token may be outside the vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["peralta_zmq"]):
    from peralta_zmq import atomic_files, wire
    from peralta_zmq.errors import WireError
    from peralta_zmq.wire import announcements, generator_status, message_fields, probe

sys.path.insert(0, str(Path(__file__).parent.parent))
from sample_data import VOCAB_SIZE, group_of

FOLDER = Path(tempfile.mkdtemp())


def decode_all(content: bytes) -> None:
    """Decode as every kind of message, also with a valid checksum."""
    sealed = content[:-4] + zlib.crc32(content[:-4]).to_bytes(4, "little")
    for frame in (content, sealed):
        try:
            group = wire.decode_group(frame, wire.GroupLimits(VOCAB_SIZE))
        except WireError:
            continue
        for each in group.rollouts:  # builds the rollouts
            assert 0 <= each.token_ids.min() <= each.token_ids.max() < VOCAB_SIZE
    for decode in (
        announcements.decode_announcement, generator_status.decode_generator_status,
        probe.decode_probe_reply, probe.decode_probe_request,
    ):  # fmt: skip
        for frame in (content, sealed):
            with suppress(WireError):
                decode(frame)
    (FOLDER / atomic_files.MANIFEST).write_bytes(content)
    (FOLDER / atomic_files.STABLE).write_text(hashlib.sha256(content).hexdigest(), "ascii")
    try:
        atomic_files.read_manifest(FOLDER)
    except atomic_files.CorruptError:
        return


def main() -> None:
    """Fuzz from frames that are right."""
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, lengths in enumerate(([4, 1, 7], [1], [30, 30, 30, 30])):
        group = group_of([float(each % 2) for each in lengths], lengths=lengths)
        (corpus / f"group{number}").write_bytes(wire.encode_group(group))
        equal = replace(group, rollouts=group.rollouts[:1] * 5)  # with a shared prompt
        (corpus / f"equal{number}").write_bytes(wire.encode_group(equal))
    announcement = wire.Announcement(
        "run", incarnation=bytes(8), senders={"a/00": wire.SenderProgress(settled=1)}
    )
    (corpus / "announcement").write_bytes(message_fields.encode_fields(announcement))
    status = wire.GeneratorStatus("run", "ann", bytes(8), worker_info={"python": "3.11"})
    (corpus / "status").write_bytes(message_fields.encode_fields(status))
    reply = wire.ProbeReply("run", run_id="run-00", created_file="file")
    (corpus / "reply").write_bytes(message_fields.encode_fields(reply))
    (corpus / "request").write_bytes(probe.encode_probe_request("discard", bytes(9)))
    manifest = b'{"step": 1, "files": [{"name": "model", "bytes": 3, "sha256": "00"}]}'
    (corpus / "manifest").write_bytes(manifest)
    atheris.Setup([*sys.argv, str(corpus)], decode_all)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
