"""Values of sums as a shell computes them: whole numbers of 64 bits, division towards zero, octal
digits behind a 0.
"""

import ast
import re
from fractions import Fraction

SUM = re.compile(r"(?:0[xX][0-9a-fA-F]{1,16}|[0-9\s+*/%()-]){1,200}")
OCTAL = re.compile(r"\b0(?=[0-9])")


def shell_sum(text: str) -> int | None:
    """The value of a sum of numbers; None where it has another form, or a shell has no value for it
    either.
    """
    if not SUM.fullmatch(text):
        return None
    try:
        # Python and shells agree on which of these signs come first
        return _value(ast.parse(f"({OCTAL.sub('0o', text)})", mode="eval").body)
    except (SyntaxError, KeyError, ArithmeticError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right):
            one = _value(left)
            other = _value(right)
            if isinstance(sign, ast.Div | ast.Mod):
                quotient = int(Fraction(one, other))  # towards zero
                if isinstance(sign, ast.Div):
                    value = quotient
                else:
                    value = one - quotient * other
            else:
                value = {ast.Add: one + other, ast.Sub: one - other, ast.Mult: one * other}[
                    type(sign)
                ]
        case _:
            raise KeyError
    if value.bit_length() > 63:
        raise OverflowError
    return value
