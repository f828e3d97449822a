#!/usr/bin/env python3
"""Checks a float32 -> bfloat16 cast of a whole file against references that share no code with Sidestream.

    cast_reference.py INPUT OUTPUT

Numbers are compared with ml_dtypes where that is installed (else with the rounding written out in numpy); NaNs must keep their sign and upper
payload bits and be quiet. Prints one line; exits 1 at the first difference, 77 without numpy.
"""
import os
import sys

try:
    import numpy as np
except ImportError:
    print("cast_reference.py: skipped: no numpy")
    sys.exit(77)
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

CHUNK = 1 << 24


def expected(bits):
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if ml_dtypes is not None:
        with np.errstate(all="ignore"):
            rounded = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    else:
        wide = bits.astype(np.uint64)
        rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(nan, ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def main():
    source, result = sys.argv[1:3]
    count = os.path.getsize(source) // 4
    if os.path.getsize(result) != 2 * count:
        print(f"{result} has {os.path.getsize(result)} bytes, not {2 * count}")
        return 1
    a = np.memmap(source, dtype=np.uint32, mode="r", shape=(count,))
    b = np.memmap(result, dtype=np.uint16, mode="r", shape=(count,))
    for i in range(0, count, CHUNK):
        wrong = expected(np.array(a[i:i + CHUNK])) != b[i:i + CHUNK]
        if wrong.any():
            k = i + int(wrong.argmax())
            print(f"element {k}: {int(a[k]):#010x} became {int(b[k]):#06x}")
            return 1
    print(f"{count} elements equal the reference ({'ml_dtypes' if ml_dtypes else 'numpy'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
