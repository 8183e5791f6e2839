"""Check the files of a model before a process loads them. Weights are read without torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from buckeye.base.columns import quoted
from buckeye.base.storage import read_json
from buckeye.config.adapter import ADAPTER_CONFIG
from buckeye.errors import InferenceError, UsageError, first_line
from buckeye.inference.engine.architecture import (
    ModelSpec,
    check_sizes,
    eos_token_ids,
    read_model_config,
    tensor_headers,
    tensor_shapes,
)
from buckeye.inference.engine.general_spec import GeneralSpec, check_computable, read_served_spec
from buckeye.inference.engine.model_fields import format_value, is_4bit
from buckeye.inference.engine.tensor_layout import EMBED, HEAD, check_tensors
from buckeye.inference.render.template_files import TemplateFiles
from buckeye.trainer.model.trainable import untrainable_reasons

User = Literal["engine", "trainer", "server"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
AGAIN = "download or copy the model again"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_EXPONENTS = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""Bits of the exponent. All of them are set in infinity and NaN only."""
_TOO_LARGE = _EXPONENTS | {"F64": 0x47F << 52}
"""Smallest exponent of a value that is not finite, or not in float32."""
_DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")
_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_MAX_SCANNED_BYTES = 2**31
_CHUNK = 2**22
_LAYER = re.compile(r"(.*?)\b(?:layers|h|blocks)\.(\d+)\.")
_QUANTIZED = ".quant_state.bitsandbytes__"
_TEXT_TOKENIZERS = ("tokenizer.model", "vocab.json")


def check_model_files(directory: Path, user: User) -> ModelSpec | GeneralSpec | None:
    """Raise `BuckeyeError` if `user` could not load the model in `directory`.

    "engine" is the embedded engine together with the trainer. "server" is `buckeye serve`, perhaps with vLLM,
    which supports more kinds of models, so tensors are not compared with the configuration. Return the spec
    of the model if the embedded engine supports it, else None.
    """
    path = directory / "config.json"
    check_readable(directory)
    config = read_model_config(path)
    _check_config(path, config, trains=user != "server")
    missing = missing_files(directory)
    if missing:
        raise missing_error(directory, missing)
    if (directory / SINGLE).is_file() and directory / SINGLE not in _weight_files(directory):
        hint = "delete the file, or the index with its files, whichever is older"
        raise _error(f"it has {SINGLE} and {INDEX}, which names other files", at=directory, hint=hint)
    check_sizes(directory)
    eos_token_ids(config, directory)
    files = _weight_files(directory)
    headers = {file: header for file, header in tensor_headers(directory).items() if file in files}
    for file, header in headers.items():
        _check_length(file, header)
    spec = _spec(directory, user)
    _check_duplicates(headers)
    if config.get("quantization_config"):
        if is_4bit(config):
            _check_4bit(path, {name: entry for header in headers.values() for name, entry in header.items()})
        return spec
    for file, header in headers.items():
        known = isinstance(spec, ModelSpec)  # other models may store masks of attention, which are not floats
        _check_dtypes(file, {name: header[name] for name in header if known or name.endswith(".weight")})
    shapes = {name: entry["shape"] for header in headers.values() for name, entry in header.items()}
    _check_index(directory, shapes)
    if user == "trainer" and EMBED not in shapes:  # transformers adds the prefix
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    if isinstance(spec, ModelSpec):
        check_tensors(directory, spec, shapes, allow_unknown=user == "trainer")
        if spec.tied_head and HEAD in shapes:
            _check_tied_head(path, headers)
    elif user != "server":
        _check_layers(directory, config, shapes)
        if not untrainable_reasons(config):  # which another check reports
            check_computable(directory)
    _check_values(headers)
    return spec


def check_adapter_files(adapter: Path, model: Path) -> None:
    """Raise `UsageError` if an adapter is damaged, or does not fit its settings or the model."""
    file = adapter / ADAPTER_WEIGHTS
    hint = "copy the adapter again, or use one of this model"
    if not file.is_file():
        raise UsageError(f"{adapter} has no {file.name}", code="BK-ADAPTER", hint=hint)
    try:
        header = tensor_headers(adapter)[file]
        settings = read_model_config(adapter / ADAPTER_CONFIG)
        _check_length(file, header)
        _check_dtypes(file, header)
        _check_values({file: header})
    except (InferenceError, UsageError) as error:
        message = f"{adapter}: cannot read the adapter: {error.message}"
        raise UsageError(message, code="BK-ADAPTER", at=error.at, hint=hint) from None
    if settings.get("peft_type", "LORA") == "LORA":
        sizes = {name: entry["shape"] for name, entry in header.items()}
        for problem in _adapter_problems(sizes, settings, tensor_shapes(model)):
            raise UsageError(f"{adapter} {problem}", code="BK-ADAPTER", at=str(file), hint=hint)


def _adapter_problems(
    matrices: Mapping[str, list[int]], settings: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> Iterator[str]:
    """Yield the reasons why matrices do not fit the settings of the adapter, or the tensors of its model."""
    kinds = {_kind(name) for name in shapes}
    pairs: dict[str, dict[str, list[int]]] = {}
    for name, shape in matrices.items():
        module, marker, letter = name.removeprefix("base_model.model.").partition(".lora_")
        weight = f"{module}.weight"
        if not marker or letter not in ("A.weight", "B.weight"):
            continue
        pairs.setdefault(module, {})[letter[0]] = shape
        if len(shape) != 2:
            yield f"has {name} of shape {shape}; expected a matrix"
        elif _kind(weight) not in kinds:  # parameter names in files may differ from module names
            known = "experts" in module or any(f".{module.rpartition('.')[2]}." in kind for kind in kinds)
            if EMBED in shapes and not known:
                yield f"is for another model: {weight}, which {name} changes, does not exist"
        elif shape[1 if letter == "A.weight" else 0] not in shapes.get(weight, ()):
            state = f"has shape {list(shapes[weight])}" if weight in shapes else "does not exist"
            yield f"is for another model: {name} has shape {shape}; {weight} {state}"
    alpha = settings.get("lora_alpha")
    if type(alpha) not in (int, float):
        yield f"has the lora_alpha {format_value(alpha)}; expected a number"
    if settings.get("target_parameters"):
        yield "changes routed experts (target_parameters), which is not supported"
    if not pairs:
        yield "has no matrices lora_A and lora_B"
    for module, sides in pairs.items():
        if sides.keys() != {"A", "B"}:
            yield f"has only one of the matrices lora_A and lora_B of {module}"
        elif sides["A"][0] != sides["B"][1]:
            yield f"has matrices of different ranks for {module}: {sides['A'][0]} and {sides['B'][1]}"
        elif not settings.get("rank_pattern") and sides["A"][0] != settings.get("r"):
            rank, stored = sides["A"][0], settings.get("r")
            yield f"has matrices of rank {rank} for {module}, and its settings the rank {stored}"


def _kind(name: str) -> str:
    """Return a parameter name with `#` in place of layer numbers."""
    return re.sub(r"\d+", "#", name)


def _spec(directory: Path, user: User) -> ModelSpec | GeneralSpec | None:
    try:
        return read_served_spec(directory) if user != "server" else None
    except InferenceError as error:
        if user == "engine" or error.code != "BK-MODEL-UNSUPPORTED":
            raise
        return None


def check_readable(directory: Path, *, at: str | None = None) -> None:
    """Raise `UsageError` if this user cannot read the files of a model, or for a broken link."""
    effective = os.access in os.supports_effective_ids

    def is_readable(path: Path, mode: int = os.R_OK) -> bool:
        return os.access(path, mode, effective_ids=effective)

    paths = [directory]
    if is_readable(directory, os.R_OK | os.X_OK):
        paths = [path for path in directory.iterdir() if path.suffix in (".json", ".safetensors")]
    for path in paths:
        if not path.is_symlink() and (path is directory or not is_readable(path)):
            raise UsageError(
                f"{path} cannot be read: permission denied",
                code="BK-FILE-PERMISSION",
                at=at,
                hint=f"give this user permission: chmod -R u+rX {quoted(directory)}",
            )
        if path.is_symlink() and not os.path.exists(path):
            raise _error(f"{path.name} is a link to a file that does not exist", at=path)


def _weight_files(directory: Path) -> list[Path]:
    names = read_json(directory / INDEX)["weight_map"].values() if (directory / INDEX).is_file() else [SINGLE]
    return [directory / name for name in names]


def missing_files(path: Path) -> list[str]:
    """Return the names of the weight files that are missing in a model directory."""
    if os.path.isfile(path / INDEX):
        try:
            files = sorted(set(map(os.fspath, read_json(path / INDEX)["weight_map"].values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [f"a readable {INDEX}"]
        return [file for file in files if not os.path.isfile(path / file)]
    return [] if os.path.isfile(path / SINGLE) else [SINGLE]


def missing_error(directory: Path, missing: list[str]) -> UsageError:
    """Return the error for missing weight files, which `missing_files` found."""
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles and missing == [SINGLE]:
        return UsageError(
            f"the weights are pickles, such as {pickles[0]}, which can run any code when they are loaded",
            code="BK-MODEL-DAMAGED",
            at=str(directory),
            hint="use a model with safetensors files, or convert it: load it with transformers and save it "
            "with `save_pretrained`",
        )
    return _error(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", at=directory)


def check_tokenizer_files(directory: Path) -> str | None:
    """Check the tokenizer of a model. Return a warning if some of its tokens have no embedding, else None.

    Raise `UsageError` if the tokenizer is missing or cannot be read, or if tokens of plain text have no
    embedding.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        if any((directory / name).is_file() for name in _TEXT_TOKENIZERS):
            return None
        raise _tokenizer_error(f"{directory} has no tokenizer", "copy its files into this directory")
    from tokenizers import Tokenizer

    try:
        content = json.loads(path.read_bytes())
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        plain = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        extra = {int(token["id"]): str(token["content"]) for token in added}
        if not isinstance(plain, int):
            raise ValueError("token ids must be whole numbers")
        size = read_model_config(directory / "config.json").get("vocab_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"cannot read a tokenizer: {first_line(error)}"
        raise _tokenizer_error(message, AGAIN, at=path) from None
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific one
        message = f"cannot read a tokenizer: {first_line(error)}"
        raise _tokenizer_error(message, AGAIN, at=path) from None
    if not isinstance(size, int):
        return None
    if plain >= size:
        message = f"the tokenizer has {plain + 1} tokens, and the embedding of the model has {size}"
        raise _tokenizer_error(message, "copy the tokenizer that belongs to the model", at=path)
    outside = [text for number, text in sorted(extra.items()) if number >= size]
    if not outside:
        return None
    files = TemplateFiles(directory)
    template, eos = files.chat_template or "", files.special_tokens_map.get("eos_token")
    used = [text for text in outside if text in template or text == eos]
    if used:
        message = f"the token {used[0]!r}, which prompts use, has no embedding: the model has {size}"
        raise _tokenizer_error(message, "copy the tokenizer that belongs to the model", at=path)
    return f"{path}: the token {outside[0]!r} has no embedding: the model has {size}"


def _check_config(path: Path, config: Mapping[str, Any], *, trains: bool) -> None:
    if not isinstance(config.get("model_type"), str):
        raise _error(f"model_type is {format_value(config.get('model_type'))}; expected a name", at=path)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
        raise _error(
            f"dtype is {format_value(dtype)}; expected one of {', '.join(_DTYPES[:4])}",
            at=path,
            hint="use the unquantized model, or correct dtype",
        )
    if config.get("quantization_config") == {}:
        raise _error("quantization_config is empty", at=path, hint="delete it if the weights are floats")
    if (name := _nan_key(config)) is not None:
        raise _error(f"{name} is NaN", at=path)
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size and trains:
        hint = "name a token of the vocabulary, or null"
        raise _error(f"pad_token_id is {pad}, and vocab_size {size}", at=path, hint=hint)
    heads, kv_heads = (config.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise _error(
            f"num_attention_heads is {heads}, which is not a multiple of num_key_value_heads, {kv_heads}",
            at=path,
        )
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
        raise _error(f"num_hidden_layers is {layers}, and layer_types has {len(kinds)} entries", at=path)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and trains:
        parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        kinds = [part.get("rope_type", part.get("type")) for part in parts]
        unknown = [kind for kind in kinds if kind is not None and kind not in _ROPES]
        if unknown:
            raise UsageError(
                f"rope type {format_value(unknown[0])} is not supported (supported: {', '.join(_ROPES)})",
                code="BK-MODEL-UNSUPPORTED",
                at=str(path),
                hint="use another model",
            )


def _nan_key(value: Any, key: str = "") -> str | None:
    """Return the key of a value that is not a number, in a JSON object of any depth, or None."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (_nan_key(part, str(name)) for name, part in pairs)), None)
    return key if isinstance(value, float) and math.isnan(value) else None


def _check_length(file: Path, header: Mapping[str, Mapping[str, Any]]) -> None:
    with file.open("rb") as handle:
        start = int.from_bytes(handle.read(8), "little") + 8
    places: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        pair = entry.get("data_offsets")
        if not _is_range(pair):
            raise _error(f"{name} has no valid data_offsets", at=file)
        places.append((pair[0], pair[1], name))
    end = 0
    for first, last, name in sorted(places):
        if first != end:
            raise _error(f"{name} is at byte {first}, and the tensor before it ends at byte {end}", at=file)
        end = last
    size = file.stat().st_size
    if size != start + end:
        raise _error(f"the file has {size} of {start + end} bytes", at=file)


def _is_range(value: Any) -> TypeGuard[list[int]]:
    whole = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    return whole and 0 <= value[0] <= value[1]


def _check_duplicates(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise `UsageError` for a tensor in two files. Programs read different ones."""
    places: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header:
            if name in places:
                raise _error(f"{name} is also in {places[name].name}", at=file)
            places[name] = file


def _check_4bit(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `UsageError` unless each weight with a state of 4 bits, and no other, has this form."""
    described = {name.partition(_QUANTIZED)[0] for name in entries if _QUANTIZED in name}
    packed = {n for n, entry in entries.items() if n.endswith(".weight") and entry["dtype"] == "U8"}
    if not described:
        raise _error("quantization_config names weights in 4 bits, and the files have other ones", at=path)
    for name in sorted(described ^ packed):
        state = "no state" if name in packed else "a state, and not this form"
        raise _error(f"quantization_config names weights in 4 bits, and {name} has {state}", at=path)


def _check_index(directory: Path, shapes: Collection[str]) -> None:
    """Raise `UsageError` if the index has a tensor that the files lack."""
    path = directory / INDEX
    for name, file in read_json(path)["weight_map"].items() if path.is_file() else ():
        if name not in shapes:
            raise _error(f"{name} is not in {file}", at=path)


def _check_dtypes(file: Path, header: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in header.items():
        dtype = entry["dtype"]
        if dtype not in _FLOATS:
            raise _error(
                f"{name} has dtype {format_value(dtype)}, and config.json has no quantization_config",
                at=file,
                hint=f"use weights in {', '.join(_FLOATS)}",
            )
        first, end = entry["data_offsets"]
        if end - first != math.prod(entry["shape"]) * _FLOATS[dtype]:
            raise _error(
                f"{name} has {end - first} bytes, which do not fit its shape {entry['shape']}", at=file
            )


def _check_layers(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Check numbers of layers, and the size of the embedding, of an architecture without a known layout."""
    count, size = config.get("num_hidden_layers"), config.get("vocab_size")
    stacks: dict[str, set[int]] = {}
    for name in shapes:
        if match := _LAYER.match(name):
            stacks.setdefault(match[1], set()).add(int(match[2]))
    present = max(stacks.values(), key=len, default=set())
    lacking = set(range(count)) - present if isinstance(count, int) and len(stacks) == 1 else set()
    if lacking:
        raise _error(
            f"the weights have no tensor of layer {min(lacking)}; config.json has {count} layers",
            at=directory,
        )
    rows = shapes.get(EMBED)
    if rows and isinstance(size, int) and rows[0] != size:
        raise _error(f"vocab_size is {size}, and {EMBED} has {rows[0]} rows", at=directory / "config.json")


def _check_tied_head(path: Path, headers: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise `UsageError` if a tied head differs from the embedding."""
    places = {name: (file, header[name]) for file, header in headers.items() for name in header}
    pairs = zip(*(_chunks(*places[name]) for name in (EMBED, HEAD)), strict=False)
    if any(first != second for first, second in pairs):
        raise _error(
            f"tie_word_embeddings is true, but the weights have a {HEAD} that differs from {EMBED}",
            at=path,
            hint="set it to false if the model has a separate head",
        )


def _check_values(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise `UsageError` for a value that is NaN, or infinite in float32.

    Only the smallest tensors, up to 2 GiB in all, are read.
    """
    entries = [
        (file, name, entry)
        for file, header in headers.items()
        for name, entry in header.items()
        if entry["dtype"] in _FLOATS
    ]
    scanned = 0
    for file, name, entry in sorted(entries, key=lambda part: math.prod(part[2]["shape"])):
        width = _FLOATS[entry["dtype"]]
        scanned += math.prod(entry["shape"]) * width
        if scanned > _MAX_SCANNED_BYTES:
            return
        exponent, limit = _EXPONENTS[entry["dtype"]], _TOO_LARGE[entry["dtype"]]
        kind = np.dtype(f"<u{width}")
        for chunk in _chunks(file, entry):
            bits = np.frombuffer(chunk, kind) & kind.type(exponent)
            if bits.size and int(bits.max()) >= limit:
                raise _error(f"{name} has a value that is NaN, or infinite in float32", at=file)


def _chunks(file: Path, entry: Mapping[str, Any]) -> Iterator[bytes]:
    first, end = entry["data_offsets"]
    with file.open("rb") as handle:
        handle.seek(int.from_bytes(handle.read(8), "little") + 8 + first)
        for position in range(first, end, _CHUNK):
            yield handle.read(min(_CHUNK, end - position))


def _error(message: str, *, at: Path, hint: str = AGAIN) -> UsageError:
    return UsageError(message, code="BK-MODEL-DAMAGED", at=str(at), hint=hint)


def _tokenizer_error(message: str, hint: str, *, at: Path | None = None) -> UsageError:
    return UsageError(message, code="BK-TOKENIZER", at=None if at is None else str(at), hint=hint)
