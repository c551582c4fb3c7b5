"""Writes and bends GGUF files, byte by byte where the format's own writer would refuse."""

from __future__ import annotations

import struct
from pathlib import Path


class Table:
    """Where a file's header keeps the fields of each tensor's entry."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def at(self, name: str) -> int:
        key = struct.pack("<Q", len(name)) + name.encode()
        assert self.data.count(key) == 1
        return self.data.find(key) + len(key)

    def dims(self, name: str) -> int:
        return struct.unpack_from("<I", self.data, self.at(name))[0]

    def set_type(self, name: str, type_id: int) -> None:
        struct.pack_into("<I", self.data, self.at(name) + 4 + 8 * self.dims(name), type_id)

    def set_dim(self, name: str, index: int, size: int) -> None:
        struct.pack_into("<Q", self.data, self.at(name) + 4 + 8 * index, size)

    def _place_of_offset(self, name: str) -> int:
        return self.at(name) + 4 + 8 * self.dims(name) + 4

    def offset(self, name: str) -> int:
        """Where the tensor's data begins, from the start of all data."""
        return struct.unpack_from("<Q", self.data, self._place_of_offset(name))[0]

    def set_offset(self, name: str, offset: int) -> None:
        struct.pack_into("<Q", self.data, self._place_of_offset(name), offset)

    def set_u32(self, key: str, value: int) -> None:
        """A metadata value of the type uint32."""
        place = self.at(key)
        assert struct.unpack_from("<I", self.data, place)[0] == 4
        struct.pack_into("<I", self.data, place + 4, value)

    def rename(self, name: str, other: str) -> None:
        assert len(name) == len(other)
        at = self.at(name) - len(name)
        self.data[at : at + len(name)] = other.encode()

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data)
        return path


def rewrite(sources: list[Path], targets: list[Path], place, metadata: dict | None = None) -> None:
    """Write the tensors of some files into other files.

    `place(name, index)` chooses the target of a tensor, None for no target. With several targets, each gets the keys
    that llama-gguf-split writes; `metadata` replaces values of the first file's keys.
    """
    import gguf

    readers = [gguf.GGUFReader(path) for path in sources]
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    writers = [_writer(path) for path in targets]
    kept = {key: f for key, f in readers[0].fields.items() if not key.startswith("split.")}
    _copy_metadata(kept, writers[0], metadata or {})
    for number, writer in enumerate(writers if len(targets) > 1 else []):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(targets))
        writer.add_int32("split.tensors.count", len(tensors))
    for index, tensor in enumerate(tensors):
        if (target := place(tensor.name, index)) is not None:
            writers[target].add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for writer in writers:
        _finish(writer)


def with_metadata(source: Path, target: Path, changes: dict) -> None:
    """Write a file again with other metadata, of any type; None leaves a key out."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = _writer(target)
    _copy_metadata({key: f for key, f in reader.fields.items() if key not in changes}, writer, {})
    for key, value in changes.items():
        if value is not None:
            kind, sub_type = gguf.GGUFValueType.get_type(value), None
            if kind is gguf.GGUFValueType.ARRAY:
                sub_type = gguf.GGUFValueType.get_type(value[0])
            writer.add_key_value(key, value, kind, sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)


def _writer(path: Path):
    import gguf

    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    return writer


def _copy_metadata(fields: dict, writer, values: dict) -> None:
    """Each key in its own type; `values` replaces what some hold."""
    for key, field in fields.items():
        if not key.startswith("GGUF."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            value = values.get(key, field.contents())
            writer.add_key_value(key, value, field.types[0], sub_type)


def _finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shard_names(folder: Path, stem: str, count: int) -> list[Path]:
    return [folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
