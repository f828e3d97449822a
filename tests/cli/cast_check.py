"""cast_check.py make FROM FILE COUNT | check FROM TO INPUT OUTPUT: casts by exact integer arithmetic, written without sight of the library's.

A finite value is sign * m * 2**e with integers m and e; the nearest value of the other format, ties to even, is found by shifting m.
A NaN keeps its sign and becomes a quiet NaN, whatever its payload.
"""
import random
import struct
import sys

# bytes, exponent bits, fraction bits
FORMATS = {"f32": (4, 8, 23), "f16": (2, 5, 10), "bf16": (2, 8, 7)}


def decode(bits: int, exponent_bits: int, fraction_bits: int) -> tuple[int, str, int, int]:
    sign = bits >> (exponent_bits + fraction_bits)
    exponent = bits >> fraction_bits & (1 << exponent_bits) - 1
    fraction = bits & (1 << fraction_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == (1 << exponent_bits) - 1:
        return sign, "nan" if fraction else "inf", 0, 0
    if exponent == 0:
        return sign, "finite", fraction, 1 - bias - fraction_bits
    return sign, "finite", fraction | 1 << fraction_bits, exponent - bias - fraction_bits


def encode(sign: int, m: int, e: int, exponent_bits: int, fraction_bits: int) -> int:
    bias = (1 << exponent_bits - 1) - 1
    least = 1 - bias - fraction_bits  # exponent of the last place of subnormals
    place = max(least, e + m.bit_length() - 1 - fraction_bits)
    shift = place - e
    if shift > 0:
        whole, rest, half = m >> shift, m & (1 << shift) - 1, 1 << shift - 1
        whole += rest > half or (rest == half and whole & 1)
    else:
        whole = m << -shift
    if whole.bit_length() > fraction_bits + 1:  # rounded up to the next power of two
        whole >>= 1
        place += 1
    field = place - least + 1 if whole >> fraction_bits else 0
    if field >= (1 << exponent_bits) - 1:
        field, whole = (1 << exponent_bits) - 1, 0
    return sign << exponent_bits + fraction_bits | field << fraction_bits | whole & (1 << fraction_bits) - 1


def read(path: str, size: int) -> tuple[int, ...]:
    data = open(path, "rb").read()
    return struct.unpack(f"<{len(data) // size}{'I' if size == 4 else 'H'}", data)


def make(kind: str, path: str, count: int) -> None:
    size = FORMATS[kind][0]
    if size == 2:
        values = list(range(65536))
    else:
        rng = random.Random(7)
        edges = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x337FFFFF, 0x33800000, 0x387FC000, 0x387FE000,
                 0x387FF000, 0x38800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000,
                 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000]
        values = [v | s for v in edges for s in (0, 0x80000000)]
        values += [rng.getrandbits(32) for _ in range(count // 2)]  # every exponent, NaNs among them
        values += [0x37000000 + rng.getrandbits(28) | rng.getrandbits(1) << 31 for _ in range(count // 2)]  # the range of f16
    open(path, "wb").write(struct.pack(f"<{len(values)}{'I' if size == 4 else 'H'}", *values))


def check(source: str, target: str, input_path: str, output_path: str) -> None:
    size_in, exponent_in, fraction_in = FORMATS[source]
    size_out, exponent_out, fraction_out = FORMATS[target]
    before, after = read(input_path, size_in), read(output_path, size_out)
    assert len(before) == len(after) > 0, (len(before), len(after))
    infinity = (1 << exponent_out) - 1 << fraction_out
    for x, y in zip(before, after):
        sign, kind, m, e = decode(x, exponent_in, fraction_in)
        if kind == "nan":
            good = y >> exponent_out + fraction_out == sign and y & infinity == infinity and y >> fraction_out - 1 & 1
        elif kind == "inf":
            good = y == (sign << exponent_out + fraction_out | infinity)
        else:
            good = y == encode(sign, m, e, exponent_out, fraction_out)
        assert good, f"{source} {x:#x} -> {target} {y:#x}"


if sys.argv[1] == "make":
    make(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    check(*sys.argv[2:6])
