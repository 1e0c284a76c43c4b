"""Which files of a model folder hold its weights."""

from __future__ import annotations

from pathlib import Path

from phalanx.weights.safetensors_source import SafetensorsSource
from phalanx.weights.sharded import ShardedSource, read_index
from phalanx.weights.source import WeightError, WeightSource
from phalanx.weights.torch_bin import TorchBinSource

_FORMATS: tuple[tuple[type[ShardedSource], str, str], ...] = (
    (SafetensorsSource, "model.safetensors", "*.safetensors"),
    (TorchBinSource, "pytorch_model.bin", "pytorch_model*.bin"),
)


def open_folder(folder: Path) -> WeightSource:
    """The weights of a folder: safetensors before .bin before GGUF.

    Of one format, the single file with the usual name comes first (as in transformers), then an index, then all files.


    Raises WeightError for a folder without weights, or with an unusable index.
    """
    for source, single, pattern in _FORMATS:
        if (folder / single).is_file():
            return source(folder, [single])
        index = folder / f"{single}.index.json"
        if index.is_file():
            weight_map = read_index(index)
            return source(folder, sorted(set(weight_map.values())), weight_map)
        files = sorted(path.name for path in folder.glob(pattern))
        if files:
            return source(folder, files)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_file(ggufs[0])
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise WeightError(f"{folder} holds {len(ggufs)} GGUF files ({names}): pass the path of one of them")
    raise WeightError(f"{folder} holds no weights: no *.safetensors, pytorch_model*.bin or *.gguf")


def open_file(path: Path) -> WeightSource:
    """The weights in one file, by its suffix."""
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent, [path.name])
    if path.suffix in (".bin", ".pt", ".pth"):
        return TorchBinSource(path.parent, [path.name])
    if path.suffix == ".gguf":
        from phalanx.weights.gguf import GGUFSource  # its package is an optional extra

        return GGUFSource(path)
    raise WeightError(f"{path} is no file of weights: its suffix must be .safetensors, .bin, .pt, .pth or .gguf")


def missing_files(folder: Path) -> list[str]:
    """The problems of a folder that has no weights or lacks files that its index names; looks at names only."""
    for _, single, pattern in _FORMATS:
        index = folder / f"{single}.index.json"
        if index.is_file() and not (folder / single).is_file():
            files = sorted(set(read_index(index).values()))
            return [f"file {folder / file} is absent" for file in files if not (folder / file).is_file()]
        if any(folder.glob(pattern)):
            return []
    return [] if any(folder.glob("*.gguf")) else [f"{folder} holds no weights"]
