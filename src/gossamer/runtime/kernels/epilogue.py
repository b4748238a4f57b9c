"""What kernels do to a result before it is stored: activations."""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I32, Function, Value


def _constant(kind: Value, number: float) -> Value:
    return ir.Constant(kind, [number] * kind.count)


def _fma(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a · b + c with one rounding."""
    return f.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def _bounded(f: Function, value: Value, least: float, most: float | None) -> Value:
    """The value within bounds; NaN stays, as in torch."""
    low = _constant(value.type, least)
    value = f.build.select(f.build.fcmp_ordered("<", value, low), low, value)
    if most is None:
        return value
    high = _constant(value.type, most)
    return f.build.select(f.build.fcmp_ordered(">", value, high), high, value)


def activate(f: Function, value: Value, activation: str | None) -> Value:
    """The activation of a vector of floats."""
    kind, build = value.type, f.build
    one = _constant(kind, 1.0)
    if activation is None:
        return value
    if activation == "relu":
        return _bounded(f, value, 0.0, None)
    if activation == "relu6":
        return _bounded(f, value, 0.0, 6.0)
    if activation in ("hardswish", "hardsigmoid"):
        gate = _bounded(f, build.fadd(value, _constant(kind, 3.0)), 0.0, 6.0)
        gate = build.fmul(gate, _constant(kind, 1 / 6))
        return gate if activation == "hardsigmoid" else build.fmul(value, gate)
    if activation in ("sigmoid", "silu"):
        numerator = value if activation == "silu" else one
        return build.fdiv(numerator, build.fadd(one, exponential(f, build.fneg(value))))
    if activation == "gelu":
        return build.fmul(build.fmul(value, _constant(kind, 0.5)), build.fadd(one, error_function(f, value)))
    raise ValueError(activation)


def round_to_steps(f: Function, value: Value, steps: Value) -> Value:
    """The value of the nearest integer, as after quantization and dequantization; `steps` points to four floats."""
    kind, build = value.type, f.build
    lanes = kind.count
    size, zero, least, most = (f.splat(f.load(steps, F32, 4 * k), lanes) for k in range(4))
    integer = f.call(f"llvm.rint.v{lanes}f32", kind, build.fdiv(value, size))
    integer = build.fadd(integer, zero)
    integer = build.select(build.fcmp_ordered("<", integer, least), least, integer)
    integer = build.select(build.fcmp_ordered(">", integer, most), most, integer)
    return build.fmul(build.fsub(integer, zero), size)


def exponential(f: Function, value: Value) -> Value:
    """eˣ as 2ⁿ·e^r with |r| ≤ ln 2 / 2 and a polynomial of degree 6 for e^r; relative error below 2e-7."""
    kind, build = value.type, f.build
    lanes = kind.count
    x = _bounded(f, value, -87.33654, 88.72283)
    n = f.call(f"llvm.rint.v{lanes}f32", kind, build.fmul(x, _constant(kind, 1.4426950408889634)))
    r = _fma(f, n, _constant(kind, -0.693145751953125), x)
    r = _fma(f, n, _constant(kind, -1.428606765330187e-06), r)
    p = _constant(kind, 1.0 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = _fma(f, p, r, _constant(kind, coefficient))
    integers = ir.VectorType(I32, lanes)
    shifted = build.shl(build.fptosi(n, integers), ir.Constant(integers, [23] * lanes))
    result = build.bitcast(build.add(build.bitcast(p, integers), shifted), kind)
    return build.select(build.fcmp_unordered("uno", value, value), value, result)


_ERF_END = 3.6
"""erf(3.6) differs from 1 by less than the error of the polynomial."""
_ERF = (
    *(0.00214869507, -0.00574097301, 0.00589966696, -0.00830666708, 0.0198889487, -0.0343613204, 0.0489264921),
    *(-0.0675541317, 0.0896798873, -0.113846798, 0.143820825, -0.195488858, 0.392712006),
)
"""erf(z) / z by powers of t = 2 z² / 3.6² - 1: a least-squares fit on Chebyshev points, weighted with z."""


def error_function(f: Function, value: Value) -> Value:
    """erf(x / √2) as z times a polynomial in z², without a division; absolute error below 7e-7."""
    kind, build = value.type, f.build
    z = build.fmul(value, _constant(kind, 0.7071067811865476))
    square = build.fmul(z, z)
    t = _fma(f, square, _constant(kind, 2 / _ERF_END**2), _constant(kind, -1.0))
    p = _constant(kind, _ERF[0])
    for coefficient in _ERF[1:]:
        p = _fma(f, p, t, _constant(kind, coefficient))
    whole = f.call(f"llvm.copysign.v{kind.count}f32", kind, _constant(kind, 1.0), value)
    ends = build.fcmp_ordered(">=", square, _constant(kind, _ERF_END**2))
    return build.select(ends, whole, build.fmul(p, z))
