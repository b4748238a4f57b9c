"""What kernels do to a result before it is stored: activations."""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I32, Function, Value


def activate(f: Function, value: Value, activation: str | None) -> Value:
    """The activation of a vector of floats."""
    kind = value.type
    lanes = kind.count
    build = f.build

    def constant(number: float) -> Value:
        return ir.Constant(kind, [number] * lanes)

    def bounded(vector: Value, least: float, most: float | None) -> Value:
        # An ordered comparison that keeps NaN, as torch does.
        vector = build.select(build.fcmp_ordered("<", vector, constant(least)), constant(least), vector)
        if most is None:
            return vector
        return build.select(build.fcmp_ordered(">", vector, constant(most)), constant(most), vector)

    if activation is None:
        return value
    if activation == "relu":
        return bounded(value, 0.0, None)
    if activation == "relu6":
        return bounded(value, 0.0, 6.0)
    if activation == "hardswish":
        gate = bounded(build.fadd(value, constant(3.0)), 0.0, 6.0)
        return build.fmul(value, build.fmul(gate, constant(1 / 6)))
    if activation == "hardsigmoid":
        return build.fmul(bounded(build.fadd(value, constant(3.0)), 0.0, 6.0), constant(1 / 6))
    if activation in ("sigmoid", "silu"):
        numerator = value if activation == "silu" else constant(1.0)
        return build.fdiv(numerator, build.fadd(constant(1.0), exponential(f, build.fneg(value))))
    if activation == "gelu":
        return build.fmul(build.fmul(value, constant(0.5)), build.fadd(constant(1.0), error_function(f, value)))
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

    def constant(number: float) -> Value:
        return ir.Constant(kind, [number] * lanes)

    def fma(a: Value, b: Value, c: Value) -> Value:
        return f.call(f"llvm.fma.v{lanes}f32", kind, a, b, c)

    low, high = constant(-87.33654), constant(88.72283)
    x = build.select(build.fcmp_ordered("<", value, low), low, value)
    x = build.select(build.fcmp_ordered(">", x, high), high, x)
    n = f.call(f"llvm.rint.v{lanes}f32", kind, build.fmul(x, constant(1.4426950408889634)))
    r = fma(n, constant(-0.693145751953125), x)
    r = fma(n, constant(-1.428606765330187e-06), r)
    p = constant(1.0 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = fma(p, r, constant(coefficient))
    integers = ir.VectorType(I32, lanes)
    shifted = build.shl(build.fptosi(n, integers), ir.Constant(integers, [23] * lanes))
    result = build.bitcast(build.add(build.bitcast(p, integers), shifted), kind)
    return build.select(build.fcmp_unordered("uno", value, value), value, result)


def error_function(f: Function, value: Value) -> Value:
    """erf(x / √2) by Abramowitz and Stegun, equation 7.1.26; absolute error below 1.5e-7."""
    kind, build = value.type, f.build
    lanes = kind.count

    def constant(number: float) -> Value:
        return ir.Constant(kind, [number] * lanes)

    def fma(a: Value, b: Value, c: Value) -> Value:
        return f.call(f"llvm.fma.v{lanes}f32", kind, a, b, c)

    x = f.call(f"llvm.fabs.v{lanes}f32", kind, build.fmul(value, constant(0.7071067811865476)))
    t = build.fdiv(constant(1.0), fma(constant(0.3275911), x, constant(1.0)))
    p = constant(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = fma(p, t, constant(coefficient))
    tail = build.fmul(build.fmul(p, t), exponential(f, build.fneg(build.fmul(x, x))))
    return f.call(f"llvm.copysign.v{lanes}f32", kind, build.fsub(constant(1.0), tail), value)
