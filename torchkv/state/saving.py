"""Writes a store into a folder, in the form of ``torchkv.state.folder``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import torchkv
from torchkv import _C
from torchkv.files import check_path, lock, opened
from torchkv.gathering import gather, others_told
from torchkv.optim.adaptor import TorchOptimizer
from torchkv.progress import bar, check_tqdm
from torchkv.state import tensor_files
from torchkv.state.content import Content
from torchkv.state.folder import FORMAT, MANIFEST, no_collections, remove_unused
from torchkv.state.parts import Written, join_written, tensor_name
from torchkv.state.tensor_files import Originals

_FILE_BYTES = 256 << 20  # of tensors; a larger tensor has its own file
_HEADER_BYTES = 48 << 20
_OF_ROWS = ("num_rows", "init", "numbers", "seed")


@no_collections()
def save(
    impl: _C.KVStore, path: str | os.PathLike[str], progress: bool = False
) -> None:
    """Writes a store into a folder, which is created if needed; replaces its store.

    All ranks of a ``dist`` store make the call.
    """
    check_path("save", path)
    check_tqdm("save", progress)
    try:
        # Throws before anything is written.
        content, begins, compressed = Content.of_process(impl)
    except TypeError as error:
        if not isinstance(updater := impl.optimizer(), TorchOptimizer):
            raise
        raise TypeError(
            "save: expected an updater that a folder can hold (None, an optimizer of "
            "torchkv.optim, a TorchScript function or module), but got the class "
            f"{updater._name()} of torch.optim; save_optimizer_states() writes its "
            "state"
        ) from error
    counts = {}
    if content.compression is not None:
        counts = {str(key): x.num_compressed for key, x in content.keys.items()}
        counts |= {str(key): count for key, count, _ in compressed}
    row_sparse = [
        [key, *(getattr(item.rows, name) for name in _OF_ROWS)]
        for key, item in content.keys.items()
        if item.rows is not None
    ]
    folder, is_first = Path(path), impl.rank() == 0
    with others_told(impl), contextlib.ExitStack() as stack:
        if is_first:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                with opened(folder.parent) as parent_fd:
                    os.fsync(parent_fd)
            # Others neither save nor load meanwhile.
            lock(stack.enter_context(opened(folder)))
            remove_unused(folder)  # what a killed save has left
        begun = (secrets.token_hex(8), content.compression is not None)
        data = gather(impl, "save", 0, json.dumps(begun).encode(), to_all=True)[0]
        save_id, compresses = json.loads(data)
        own = {  # what this rank has not sent, if rank 0 saves the compression
            tensor_name(f"residual.{impl.rank()}", key, -1): residual
            for key, _, residual in compressed
            if compresses and residual is not None
        }
        shows = progress and is_first
        with bar("save", _num_bytes(content, own), shows) as add:
            written = _write_data(impl, content, begins, own, folder, save_id, add)
            written.compressed = counts if compresses else {}
            written.row_sparse = row_sparse
        if impl.num_workers() == 1:
            all_written = [written]
        else:
            gathered = gather(impl, "save", 1, written.to_bytes())
            all_written = [Written.from_bytes(data) for data in gathered]
        if is_first:
            _write_manifest(impl, content.fields(), folder, save_id, all_written)
            remove_unused(folder)  # the previous store
        gather(impl, "save", 2, b"")  # the store is written


def _num_bytes(content: Content, own: dict[str, Tensor]) -> int:
    """The bytes of the tensors."""
    tensors = [*own.values()]
    tensors += [] if content.updater is None else [content.updater]
    for item in content.keys.values():
        tensors += [item.value, *item.state.values(), *item.residuals]
        tensors += [] if item.rows is None else [item.rows.ids]
    return sum(tensor.nbytes for tensor in tensors)


def _write_data(
    impl: _C.KVStore,
    content: Content,
    begins: list[int],
    own: dict[str, Tensor],
    folder: Path,
    save_id: str,
    add: Callable[[int], object],
) -> Written:
    """Writes the tensors, and removes the files again if that fails."""
    keys = content.keys.values()
    written = Written(
        list(content.keys),
        begins,
        [key.value.numel() for key in keys],
        {
            "versions": [key.version for key in keys],
            "steps": [key.step for key in keys],
            "accumulated": [key.num_accumulated for key in keys],
        },
    )
    of_rank = f"{impl.rank()}-" if impl.rank() else ""
    originals = Originals()
    try:
        with tensor_files.Writer() as writer, opened(folder) as folder_fd:
            for group in _grouped(_drained(content, begins, own, originals)):
                number = len(written.files) + 1
                name = f"data-{save_id}-{of_rank}{number:05}.safetensors"
                written.files.append({"name": name})
                num_bytes = sum(tensor.nbytes for _, tensor in group)
                written.files[-1] |= writer.write(folder / name, group)
                add(num_bytes)
            os.fsync(folder_fd)  # the names, before the manifest has them
    except BaseException:
        _remove(folder, written.files)
        raise
    written.strides, written.dtypes = originals.strides, originals.dtypes
    return written


def _write_manifest(
    impl: _C.KVStore,
    fields: dict[str, Any],
    folder: Path,
    save_id: str,
    written: list[Written],
) -> None:
    """Replaces the folder's store, or removes the files of all ranks."""
    unfinished = folder / f"manifest-{save_id}.tmp"
    files = [file for one in written for file in one.files]
    try:
        for rank, one in enumerate(written[1:], 1):
            _check_shared(folder, rank, one.files)
        keys = cast(list[int | str], impl.keys()) if written[1:] else written[0].keys
        manifest = {
            "format": FORMAT,
            "torchkv": torchkv.__version__,
            **fields,
            **join_written(keys, impl.shape, written),
        }
        if "compression" in fields:
            manifest["compressed"] = [
                max(one.compressed.get(str(key), 0) for one in written)
                for key in manifest["keys"]
            ]
        with open(unfinished, "wb") as file:
            file.write(_to_bytes(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / MANIFEST)
    except BaseException:
        _remove(folder, [{"name": unfinished.name}, *files])
        raise
    with opened(folder) as folder_fd:
        os.fsync(folder_fd)


def _check_shared(folder: Path, rank: int, files: list[dict[str, Any]]) -> None:
    for file in files:
        try:
            with open(folder / file["name"], "rb") as opened_file:
                size = os.fstat(opened_file.fileno()).st_size
        except FileNotFoundError:
            size = -1
        if size != file["size"]:
            raise OSError(
                f"save: expected a folder that all ranks share, but rank 0 does not "
                f"find what rank {rank} has written to {folder}; state_dict() brings "
                f"the whole store to rank 0"
            )


def _remove(folder: Path, files: list[dict[str, Any]]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            (folder / file["name"]).unlink()


def _drained(
    content: Content, begins: list[int], own: dict[str, Tensor], originals: Originals
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by name, as the files hold it; the content releases it."""
    if content.updater is not None:
        yield "updater", originals.to_stored("updater", content.updater)
    for key, begin in zip(list(content.keys), begins, strict=True):
        item = content.keys.pop(key)
        residuals = {f"residual.{i}": x for i, x in enumerate(item.residuals)}
        row_ids = {} if item.rows is None else {"row_ids": item.rows.ids}
        tensors = {"value": item.value, **row_ids, **item.state, **residuals}
        for role, tensor in tensors.items():
            name = tensor_name(role, key, begin)
            yield name, originals.to_stored(name, tensor)
    for name in list(own):
        yield name, originals.to_stored(name, own.pop(name))


def _grouped(
    tensors: Iterator[tuple[str, Tensor]],
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of each file."""
    group: list[tuple[str, Tensor]] = []
    size = header = 0
    for name, tensor in tensors:
        size += tensor.nbytes
        header += tensor_files.header_bytes(name)
        if group and (size > _FILE_BYTES or header > _HEADER_BYTES):
            yield group
            group, size, header = [], tensor.nbytes, tensor_files.header_bytes(name)
        group.append((name, tensor))
    if group:
        yield group


def _to_bytes(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that begins with the checksum of what follows it."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    return b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest
