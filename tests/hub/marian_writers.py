"""Write files as Marian does."""

import re
import struct

import numpy as np
import yaml


FLOAT32, FLOAT16, INT8 = 0x404, 0x402, 0x101
INTGEMM8 = {"upstream": 0x10001, "fork": 0x4101}


def settings_bytes(settings):
    """The settings as Marian saves them: YAML text that ends in NUL, as signed bytes."""
    return np.frombuffer(yaml.safe_dump(settings).encode() + b"\0\0\0", dtype=np.int8)


def write_npz(path, settings, arrays):
    np.savez(path, **{"special:model.yml": settings_bytes(settings)}, **arrays)
    return path


def is_quantized(name, fork):
    """Whether int8 files of a fork hold 8-bit numbers for an array."""
    return ("Wemb" in name and fork == "fork") or re.search("_W[foqkv12it]?$", name) is not None


def write_bin(path, settings, arrays, fork="fork", version=1):
    """Write `model.bin` with 8-bit matrices (`fork=None`: with the type of the arrays); returns the path."""
    items = []
    for name, values in arrays.items():
        if fork and is_quantized(name, fork):  # rounded, transposed except for embeddings, then the multiplier
            multiplier = np.float32(127 / np.abs(values).max())
            rounded = np.clip(np.rint(values * multiplier), -127, 127).astype(np.int8)
            data = (rounded if "Wemb" in name else rounded.T).tobytes() + struct.pack("<f", multiplier)
            items.append((name, INTGEMM8[fork], values.shape, aligned(data)))
            items.append((f"{name}_QuantMultA", FLOAT32, (1,), aligned(struct.pack("<f", 12.5))))
        else:
            kind = {2: FLOAT16, 4: FLOAT32}[values.dtype.itemsize]
            items.append((name, kind, values.shape, aligned(values.tobytes())))
    text = settings_bytes(settings)
    items.append(("special:model.yml", INT8, text.shape, text.tobytes()))
    return write_items(path, items, version)


def write_items(path, items, version=1):
    """Write items (name, type, shape, bytes) in Marian's binary format."""
    head = struct.pack("<QQ", version, len(items))
    head += b"".join(struct.pack("<4Q", len(n) + 1, kind, len(shape), len(data)) for n, kind, shape, data in items)
    head += b"".join(name.encode() + b"\0" for name, *_ in items)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(head) + 8) % 256
    path.write_bytes(head + struct.pack("<Q", padding) + bytes(padding) + b"".join(data for *_, data in items))
    return path


def aligned(data):
    """Data padded to a multiple of 256 bytes, as Marian stores it."""
    return data + bytes(-len(data) % 256)
