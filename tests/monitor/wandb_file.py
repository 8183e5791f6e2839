"""Reader of the files of offline wandb: protobuf records in a log of LevelDB's format."""

from __future__ import annotations

import json
import struct

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768
_FILE_HEADER = 7
_RECORD_HEADER = 7
_LAST_PARTS = (1, 4)
"""Kinds of a whole record, and of the last part of a divided one."""


def read_records(path):
    """Yield every record of a `.wandb` file."""
    data, position, parts = path.read_bytes(), _FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while position + _RECORD_HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            return
        position += _RECORD_HEADER
        parts += data[position : position + length]
        position += length
        if kind in _LAST_PARTS:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path):
    """Yield every logged row, without wandb's own columns."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            yield {name: value for name, value in row.items() if not name.startswith("_")}


def config(path):
    """Return the run's configuration."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "run":
            return {i.key: json.loads(i.value_json) for i in record.run.config.update}
    raise AssertionError("no run record")
