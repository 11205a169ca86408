"""Decode ggml types whose codes are indexes into a table, and ternary types.

The types with a table are IQ1 to IQ4, MXFP4 and NVFP4. A table has at most 16 values, so a 4-bit code represents each
weight exactly. Codes of the ternary and binary types are one more than the weight without its scale.

IQ2 and IQ3 store the absolute values of several weights as one codebook entry, and the signs separately. The lower half
of an IQ2 or IQ3 table contains the positive values, and the upper half contains the same values with a minus sign. IQ1
stores a shift instead of signs. The lower half of the IQ1 table contains the values -1, 0 and 1 plus 1/8, and the upper
half contains the values -1, 0 and 1 minus 1/8.

These types store the codes of several adjacent weights as one index into a codebook, which lists the allowed
combinations of codes. A combination is stored as one number, and its codes are the digits of the number, lowest digit
first. Numbers have eight digits in base 3 for IQ1 and IQ2, and four digits in base 8 for IQ3.

The numbers of a codebook are in ascending order. The dict `_BOOKS` stores the numbers of each codebook as a bitmap with
one bit per possible number, compressed with zlib and base85. The codebooks come from ggml (MIT): `kgrid_*` in
`ggml-quants.c`.
"""

import base64
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.ggml_type import GgmlType
from helexa.neuron.weights.gguf.k_blocks import fields, half, nibbles, planes, reinterpret
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor

# For each type: base of the digits, digits per number, compressed bitmap of the numbers.
_BOOKS: dict[GgmlType, tuple[int, int, str]] = {
    GgmlType.IQ1_S: (
        3,
        8,
        "c-k#eO>0z16uqyx#k83y_qA0qE*kA7fk#%6iL;cd<W&+S(JE7AEBc6nlGQ*KX*Z#@1057+gows$6w-}Cbfte_m;o2UY|_#*VZa~*x^U%6T=`"
        "Mm&aUdhx#ygF&eKOplgaU0)cQ?aLaWb`!=%}lC@i-gZEZ5CFdhU_><`D{U2pdIZAiiRBZ^Tjpc--1mjt-&r-O_l7bZy)3*%3zRUeyRXfJ~s5"
        "?<5PM<UK4aB<I3L}>n{hnc{+>K$G67mn>zvR$=UOtZPa7LUsmQWQ2bN)ou!Kj_yfb~LQyR=nku)`P+=g=?+GNRyF#AueD^;Yg67k)HG=(os>"
        "Uh!rG~(gRxZza2HhyPsM)=qh9|ehXUldkU;_wA!C+2Fv`rcq!34!0Fqz%0;&7#XeAmBu`}t6ci#>+3WlSwzITy{$0C$RU8lhlWkibbyz6nxO"
        "L=l|4%yAAJ4G^LV^S*V!(*CwdNU%)Qrh$#q9cyW*tq|@QQ}j896#XTv`6q5lhc&*LLPVeEGcad$xT4&D*b^FV9bJ+^}ih*A`2jX2rIue$9q9"
        "{)`S!jt!g=X1D{vGEMnukjj}Wcvs!oqc~_d61@aP1V3Bvcjc9uWpgt6=l#-;vm1GpU-HX*>(|GJ!F2C{R9{8qA7trFiLFJ0VD+S2Ny_0+jia"
        "iUvPbU!Gt<44HyL$nQ%A{iI)xZW(;0iU=zRoe)YSg8LFF!L&Ei&Q)FngSxd==b)ez8IIEAq?gCPR1z1`cE#svx$dBcgrdMr~`+vY{G*{j)Ld"
        "H7J(;|V_S3+rEqj0{aUGZ~5`z3=#nUT2ypkIbf^7Qd%#dKF#22&cWI$B=(k{y*i-P-%7a6aqltG8tC11XWn$8wuQe)#`Rb$ezM@h+=MX6ehv"
        "4>@KW-1MD8)wE",
    ),
    GgmlType.IQ2_XXS: (
        3,
        8,
        "c-nPRORj`4470MbdWwiuj~R8vF<3s$DPNNQV8mEdDvh1mfzMz4@MsNM4-kL~Dg?0u3Z<Q}s#5&i%a^YL7=qILyw)W4Cso8iRnlpCLd`c4Du;"
        "C<RlH?aajd+e<FY7)k8>WSTt@47wX1jPqB41q=2e+&9hy;#r#nzQ(d`wV2I-N(E<X_7hks$x7)Do8!;TEvZcdv+$;Bf*s-;99+U-&7)=?Kns"
        "oS&M%ZZjW8ztGaG<oin^)>q~!#84@<5Q?C;cAe-jqH$lW6s<jvF<nQc*Z$~yKl@H%B$)D{-`Y{-_v~Aze0c0{sHUUCpi",
    ),
    GgmlType.IQ2_XS: (
        3,
        8,
        "c-mc2ORj`4470L|dWwh@;*?QWh*MOoP)|Aew9xme83;|{*iP^L>UVu^J$f&9<)%0;rYcZH@zkTcz*1-`0#F4vd)cqIa~EY0S(m36us~sl4e+"
        "uqnt+xnD5p1ifdk&k2^cqyDKl&hVwLuN#<u{Y#82-D2r2AS*#~B;6>b%zZ?$An2Qav5OyP;?IjC1*OUa>YNXBOJs!l*N%2M9ag1pZ#qbS<pD"
        "ODX)Ys@FiGwcn?g7z}ZUJ85J?WuXe7)kq!xj_MC=sehbo`f6hw91-EjVApg;SBK(#S-ctqy5bslAAu_xaBeODLPcR%XL4jpOCvsj1dP@iIwg"
        "yVBr<uBI!nKMuUZZ1qQNNP<bV}FGN4KvRv{ky>(2~*Gt;x6q$P={6Cb#@3Dfxx_wWh`vWo0U*P",
    ),
    GgmlType.IQ2_S: (
        3,
        8,
        "c-n1JOKt@r42!agI0c#&;*=39#3>LflvCCTO#7-9jpk=;Y=fB%TefG%OIlXuE_Fz<Ougf=%xu>+l3Bq8hyjg~lMrunmZ<Wy`~YGiEi#3On5v"
        "Bd<vmKZSi%aW(psKWGWlAsphF>8rUC+;ZDfa(=s@_F#i0yss$-8fvv#Vf@jNV{kuiVLgA~66J1A2@4RVJKUxH}IH-$JpaZ^g})pmKjjd>lmo"
        "jtPqGOJ!xqXVV(I)s3f1HneH&<4|id_Zsqi~d9|fZw$~1nHWO$bgs-@JBFei6qb36Asxo<#s4;BRhd~d<sfnbhG0<$t^)oE$@gK%zO1xyELV"
        "B%s1k`FAKZeJ@WjCtPZ6s4%XC=!ChZ<C{I5t%jB|RQ$q0^0H^%ZVVCdNfJ9HPfzZdmWSrg_I({bPgptf%^rJMcpz`hTS7u<>s9rVvW-WSa`T"
        "|j+oGk",
    ),
    GgmlType.IQ3_XXS: (
        8,
        4,
        "c-l=-K?=h#3{ye}VW$qZd!FLL9+1HvWO^EVh1sdkoaHp#R7#szmgHo6m{j1}>~2z^o7e*jro|>W6f;suxGq5ThwwrH-tdy3S=*8VCKknJ;ww"
        "~xN=C-Lt2kc1f`n?I#<sN&{qc;xi`rsIog^>xCi>0vO72GEj+P?`#G30*;dkafo0(MD70~26E5oy)Fh-PS2J_iYxE!Gh>5A3e2Aw8l#Lz*UZ"
        "2xyz&!sE!Xy7=t?heopubnm$;UMyR4j1Wf!f;*xLWT6+u!rw*Hy!tqyDZ17JdzPtf@!~_J7yrh&WtZi",
    ),
    GgmlType.IQ3_S: (
        8,
        4,
        "c-k#dK}rKb5Ud?m7(7iN59ovqtiR~U2pdlmS^v`sIn3TR;sZue5Z@6$Amj-`@D=vV+J}a&>aMEU{rNq)_mDQ1)6rXa`g-zl6)-xV9&D<-%sL"
        "tw(&E+K!8jAZAn=FIh`{BX?s3iZ9eL!0y{saQwa{i<M_rV8i?Gza!ZNf5Tx$=B>&%}&x2aFnb2>I1DZfG3@eJJ?w}Hf9jj>U<u}qaX$V(Q{%"
        "bJZi0qBwX8+P2=0D&xpG^*kpx3aC_+^woo1gDy;frCMb5s>PfCelExhl@Z5=M_J&lZwQK<TIaOt1Nd_t_Z4Nkqr(Irw~QLK*sjOloy2EUU#s"
        "N3YKfvLC9pG+yhGG#kO><KBF1{I~{B$E!8AqIlE}-BNQAl`R33C|JNFjj93D(#a!oZudm_a(c~OHe<Yb)Y4R?AVbTWv01QA~hX",
    ),
}

Table = NDArray[np.int8]


@tensors.cached()
def codebook(kind: GgmlType) -> Tensor:
    """Return the codebook of type `kind`, a key of `_BOOKS`: 256 to 2048 integers.

    An entry holds the codes of adjacent weights, one code per byte, with the first code in the lowest byte. Entries are
    int64 for eight codes and int32 for four codes.
    """
    base, digits, packed = _BOOKS[kind]
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8))
    codes = np.flatnonzero(bits)[:, None] // base ** np.arange(digits) % base
    return tensors.from_numpy(codes.astype(np.uint8)).view(tensors.int64 if digits == 8 else tensors.int32).flatten()


@tensors.cached()
def _codebook_entries(kind: GgmlType) -> Tensor:
    """Return the codes of codebook entries, uint8 [entries, 8] or [entries, 4]."""
    entries = codebook(kind)
    return entries.view(tensors.uint8).view(len(entries), -1)


def _table(*numbers: int) -> Table:
    return np.array([*numbers, *[0] * (16 - len(numbers))], np.int8)


def _both_signs(*numbers: int) -> Table:
    lower = [*numbers, *[0] * (8 - len(numbers))]
    return _table(*lower, *[-number for number in lower])


_IQ1 = _table(-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7)  # in units of 1/8: -1, 0 and 1, each shifted up or down by 1/8
_IQ2 = _both_signs(8, 25, 43)
_IQ3_XXS = _both_signs(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _both_signs(1, 3, 5, 7, 9, 11, 13, 15)
_IQ4 = _table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = _both_signs(0, 1, 2, 3, 4, 6, 8, 12)  # in units of 1/2
_POWERS_OF_TWO = np.array([2.0 ** (exponent - 128) for exponent in range(256)], np.float32)
# Sign bits of eight weights for each seven-bit code. The eighth bit makes the number of minus signs even.
_EVEN = np.array([signs | signs.bit_count() % 2 << 7 for signs in range(128)], np.uint8)


def _iq1_s(blocks: Tensor) -> GroupwiseTensor:
    high = reinterpret(blocks[:, 34:], tensors.int16).int()
    entries = blocks[:, 2:34].unflatten(-1, (8, 4)).int() | (high[..., None] >> tensors.arange(0, 12, 3) & 7) << 8
    down = (high >> 15 & 1).byte().repeat_interleave(32, dim=-1)
    scale = _odd(half(blocks, 0), high >> 12 & 7, 8)
    return _weights(_codes(GgmlType.IQ1_S, entries) | down << 3, scale, 32, _IQ1, GgmlType.IQ1_S)


def _iq1_m(blocks: Tensor) -> GroupwiseTensor:
    halfwords = reinterpret(blocks[:, 48:], tensors.int16).int()
    # The bits of the float16 scale are the upper nibbles of four words.
    unit = ((halfwords >> 12 & 15) << tensors.arange(0, 16, 4)).sum(-1, keepdim=True).short().view(tensors.float16)
    high = fields(blocks[:, 32:48], 4)
    codes = _codes(GgmlType.IQ1_S, blocks[:, :32].int() | (high & 7).int() << 8)
    small = (halfwords[..., None] >> tensors.arange(0, 12, 3) & 7).flatten(1)
    codes |= (high & 8).repeat_interleave(8, dim=-1)
    return _weights(codes, _odd(unit, small, 8), 16, _IQ1, GgmlType.IQ1_S)


def _iq2_xxs(blocks: Tensor) -> GroupwiseTensor:
    pairs = reinterpret(blocks[:, 2:], tensors.int32).unflatten(-1, (8, 2))
    entries, signs_and_scale = reinterpret(pairs[..., 0], tensors.uint8), pairs[..., 1]
    codes = _signed(_codes(GgmlType.IQ2_XXS, entries), _seven_bit_signs(signs_and_scale))
    scale = _odd(half(blocks, 0), signs_and_scale >> 28 & 15, 8)
    return _weights(codes, scale, 32, _IQ2, GgmlType.IQ2_XXS)


def _iq2_xs(blocks: Tensor) -> GroupwiseTensor:
    entries = reinterpret(blocks[:, 2:66], tensors.int16).int()
    codes = _signed(_codes(GgmlType.IQ2_XS, entries & 511), tensors.from_numpy(_EVEN)[entries >> 9 & 127])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 66:], 4), 8), 16, _IQ2, GgmlType.IQ2_XS)


def _iq2_s(blocks: Tensor) -> GroupwiseTensor:
    entries = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 2).int() << 8
    codes = _signed(_codes(GgmlType.IQ2_S, entries), blocks[:, 34:66])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 74:], 4), 8), 16, _IQ2, GgmlType.IQ2_S)


def _iq3_xxs(blocks: Tensor) -> GroupwiseTensor:
    signs_and_scale = reinterpret(blocks[:, 66:], tensors.int32)
    codes = _signed(_codes(GgmlType.IQ3_XXS, blocks[:, 2:66]), _seven_bit_signs(signs_and_scale))
    scale = _odd(half(blocks, 0), signs_and_scale >> 28 & 15, 4)
    return _weights(codes, scale, 32, _IQ3_XXS, GgmlType.IQ3_XXS)


def _iq3_s(blocks: Tensor) -> GroupwiseTensor:
    entries = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1).int() << 8
    codes = _signed(_codes(GgmlType.IQ3_S, entries), blocks[:, 74:106])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 106:], 4), 1), 32, _IQ3_S, GgmlType.IQ3_S)


def _iq4_nl(blocks: Tensor) -> GroupwiseTensor:
    return _weights(nibbles(blocks[:, 2:], 16), GroupScale(half(blocks, 0)), 32, _IQ4)


def _iq4_xs(blocks: Tensor) -> GroupwiseTensor:
    small = fields(blocks[:, 4:8], 4) | fields(blocks[:, 2:4], 2) << 4
    scale = GroupScale(half(blocks, 0), small.view(tensors.int8) - 32)
    return _weights(nibbles(blocks[:, 8:], 16), scale, 32, _IQ4)


def _tq1_0(blocks: Tensor) -> GroupwiseTensor:
    """Decode TQ1_0, in which a byte holds up to five ternary digits."""
    runs = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    powers = tensors.tensor([1, 3, 9, 27, 81], dtype=tensors.uint8)
    # The uint8 product overflows on purpose: it drops the digits before the current digit.
    remainders = [(run[:, None] * powers[:digits, None]).flatten(1) for run, digits in runs]
    # A byte divided by 256 is a fraction in base 3. The product with 3 has the first digit above bit 8.
    codes = (tensors.cat(remainders, dim=-1).short() * 3 >> 8).byte()
    return _ternary(codes, half(blocks, 52), 8)


def _tq2_0(blocks: Tensor) -> GroupwiseTensor:
    return _ternary(planes(blocks[:, :64], 2), half(blocks, 64), 8)


def _q1_0(blocks: Tensor) -> GroupwiseTensor:
    return _ternary(fields(blocks[:, 2:], 1) << 1, half(blocks, 0), 4)


def _mxfp4(blocks: Tensor) -> GroupwiseTensor:
    codes, unit = nibbles(blocks[:, 1:], 16), tensors.from_numpy(_POWERS_OF_TWO)[blocks[:, :1].int()]
    narrow = unit.half()
    inexact = (narrow.float() != unit).squeeze(-1)
    representable = not (codes[inexact] & 7).any()  # the scale of a group of zeros is irrelevant
    return _weights(codes, GroupScale(narrow if representable else unit), 32, _FP4)


def _nvfp4(blocks: Tensor) -> GroupwiseTensor:
    unit = reinterpret(blocks[:, :4] & 0x7F, tensors.float8_e4m3fn).half().nan_to_num_(0) / 2
    return _weights(nibbles(blocks[:, 4:], 8), GroupScale(unit), 16, _FP4)


# Decoder of each type. It converts uint8 [blocks, bytes] to a matrix [blocks, weights], one row per block.
TABLE_BLOCKS: dict[GgmlType, Callable[[Tensor], GroupwiseTensor]] = {
    GgmlType.IQ1_S: _iq1_s,
    GgmlType.IQ1_M: _iq1_m,
    GgmlType.IQ2_XXS: _iq2_xxs,
    GgmlType.IQ2_XS: _iq2_xs,
    GgmlType.IQ2_S: _iq2_s,
    GgmlType.IQ3_XXS: _iq3_xxs,
    GgmlType.IQ3_S: _iq3_s,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.IQ4_XS: _iq4_xs,
    GgmlType.TQ1_0: _tq1_0,
    GgmlType.TQ2_0: _tq2_0,
    GgmlType.Q1_0: _q1_0,
    GgmlType.MXFP4: _mxfp4,
    GgmlType.NVFP4: _nvfp4,
}


def _weights(
    codes: Tensor, scale: GroupScale, group_size: int, table: Table, kind: GgmlType | None = None
) -> GroupwiseTensor:
    """Return a matrix with the value table `table`, and the codebook of type `kind`."""
    values, entries = tensors.from_numpy(table), None if kind is None else _codebook_entries(kind)
    return GroupwiseTensor(codes, scale, None, zero=0, bits=4, group_size=group_size, table=values, codebook=entries)


def _codes(kind: GgmlType, entries: Tensor) -> Tensor:
    """Return the codes, uint8 [blocks, 256], of the codebook entries `entries`."""
    return codebook(kind)[entries.flatten(1).int()].view(tensors.uint8)


def _signed(codes: Tensor, signs: Tensor) -> Tensor:
    """Add 8 to the codes [blocks, 256] whose bit in `signs` [blocks, 32] is set."""
    # The upper half of the table has the negative values.
    return codes | fields(signs, 1) << 3


def _seven_bit_signs(packed: Tensor) -> Tensor:
    """Return the sign bits of 256 weights per block, uint8 [blocks, 32]."""
    # The low 28 bits of each of 8 integers are four seven-bit codes, each for eight weights.
    return tensors.from_numpy(_EVEN)[packed[..., None] >> tensors.arange(0, 28, 7) & 127].flatten(1)


def _odd(unit: Tensor, small: Tensor, divisor: int) -> GroupScale:
    """Return the scales `unit * (2 * small + 1) / divisor`."""
    # The division uses float32, because float16 would lose bits.
    exact = unit if divisor == 1 else unit.float() / divisor
    return GroupScale(exact, (2 * small + 1).byte())


def _ternary(codes: Tensor, unit: Tensor, groups: int) -> GroupwiseTensor:
    """Return weights `unit * (code - 1)`; `groups` groups of a block share a scale."""
    scale = GroupScale(unit.expand(-1, groups).contiguous())
    return GroupwiseTensor(codes, scale, None, zero=1, bits=2, group_size=32)
