"""How good files are broken: any bytes in any way, and each format where it hurts most.

`break_file(content, suffix, dice)` gives a broken copy and says what was done to it; the same dice give the same copy.
"""

import random

from mutations import arrays, sets, tables, tensors
from mutations.anything import OF_ANY, flip
from mutations.arrays import npy, promised

__all__ = ["break_file", "dice_of", "npy", "promised"]

OF_FORMAT = {
    ".npy": (arrays.npy_header, arrays.npy_values),
    ".npz": (
        arrays.npz_member,
        arrays.npz_member,
        arrays.npz_names,
        arrays.npz_directory,
        arrays.npz_directory,
        arrays.npz_promise,
    ),
    ".csv": (tables.csv_lines, tables.csv_field, tables.csv_columns),
    ".parquet": (tables.parquet_footer, tables.parquet_pages),
    ".safetensors": (
        tensors.safetensors_header,
        tensors.safetensors_metadata,
        tensors.safetensors_metadata,
        tensors.safetensors_values,
    ),
    ".sqlite": (tables.sqlite_page, tables.sqlite_text),
    ".idx": (sets.idx_head,),
    ".gz": (sets.packed,),
    ".pickle": (sets.pickle_step,),
    ".tar": (sets.tar_entry, sets.tar_extra),
    ".mat": (sets.mat_tag, sets.mat_tag, sets.mat_cells),
    ".lines": (sets.text_lines,),
}


def break_file(content, suffix, dice):
    """What was done, and the broken copy."""
    own = OF_FORMAT.get(suffix, ())
    ways = OF_ANY if not own or dice.random() < 0.5 else own
    name, result = "", content
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        way = dice.choice(ways)
        try:
            changed = way(result, dice)
        except Exception:  # what an earlier step broke may not be understood any more, and is broken all the same
            way, changed = flip, flip(result, dice)
        name, result = f"{name}+{way.__name__}" if name else way.__name__, changed
    return name, result


def dice_of(*words):
    """Dice that fall the same way for the same words, on every machine."""
    return random.Random(" ".join(map(str, words)))
