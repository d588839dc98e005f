r"""Answers as models write them beside the truth: 60 truths, the forms they are answered in, 14 ways of saying so.

`expected_verdicts.json` holds what verl's `math_dapo` and the library's own metric say about each, in this order: `+`
right, `-` wrong, `?` the library raised (no truth to be read), one text per reward.
"""

from __future__ import annotations

# truth: what is said in its place; the first is always the truth itself
ANSWERS: dict[str, tuple[str, ...]] = {
    # numbers
    "34": ("34", "34.0", "034", "35", "-34", "34,", "thirty-four"),
    "1000": ("1000", "1,000", "10^3", "1{,}000", "1 000", "1000.00"),
    "-7": ("-7", "−7", "- 7", "7", "\\text{-7}"),
    "0.5": ("0.5", ".5", "1/2", "\\frac{1}{2}", "\\frac12", "50\\%", "0,5"),
    "3.14159": ("3.14159", "\\pi", "3.1416", "3.141592"),
    "1,234,567": ("1,234,567", "1234567", "1.234567e6"),
    "10^{10}": ("10^{10}", "10^10", "10000000000", "10^{11}"),
    "12\\%": ("12\\%", "12%", "0.12", "12", "12 percent"),
    "\\infty": ("\\infty", "infinity", "∞", "-\\infty"),
    "2+3i": ("2+3i", "3i+2", "2 + 3i", "2-3i"),
    "0": ("0", "0.0", "-0", "\\emptyset", ""),
    # fractions, roots, powers
    "\\frac{3}{4}": ("\\frac{3}{4}", "\\frac34", "\\dfrac{3}{4}", "\\tfrac{3}{4}", "3/4", "0.75", "\\frac{6}{8}",
                      "\\frac{4}{3}"),
    "-\\frac{1}{3}": ("-\\frac{1}{3}", "\\frac{-1}{3}", "-1/3", "\\frac{1}{-3}", "-0.333333", "-0.33"),
    "\\frac{\\sqrt{2}}{2}": ("\\frac{\\sqrt{2}}{2}", "\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt{2}}", "\\sqrt{2}/2",
                              "0.7071"),
    "2\\sqrt{3}": ("2\\sqrt{3}", "2\\sqrt3", "\\sqrt{12}", "2 \\sqrt {3}", "3\\sqrt{2}"),
    "\\sqrt[3]{5}": ("\\sqrt[3]{5}", "5^{1/3}", "5^{\\frac{1}{3}}", "\\sqrt{5}"),
    "2^{n+1}": ("2^{n+1}", "2\\cdot 2^n", "2 \\times 2^{n}", "2^{n}"),
    "\\frac{a+b}{2}": ("\\frac{a+b}{2}", "\\frac{b+a}{2}", "\\frac{a}{2}+\\frac{b}{2}", "(a+b)/2", "\\frac{a-b}{2}"),
    "\\binom{10}{3}": ("\\binom{10}{3}", "120", "{10 \\choose 3}", "\\dbinom{10}{3}"),
    "\\log_2 5": ("\\log_2 5", "\\log_{2}{5}", "\\frac{\\ln 5}{\\ln 2}", "\\log_5 2"),
    "e^{-1}": ("e^{-1}", "\\frac{1}{e}", "1/e", "e"),
    # expressions, equations
    "x^2+2x+1": ("x^2+2x+1", "(x+1)^2", "x^{2} + 2x + 1", "1+2x+x^2", "x^2+2x"),
    "x=5": ("x=5", "5", "x = 5", "y=5", "5=x"),
    "y=2x+3": ("y=2x+3", "2x+3", "y = 3 + 2x", "y=2x-3"),
    "x \\le 3": ("x \\le 3", "x\\leq 3", "(-\\infty, 3]", "3 \\ge x", "x < 3"),
    "\\sin x": ("\\sin x", "\\sin(x)", "\\sin{x}", "\\cos x"),
    "n!": ("n!", "n\\cdot (n-1)!", "(n)!", "n"),
    "\\pi r^2": ("\\pi r^2", "\\pi r^{2}", "r^2\\pi", "2\\pi r"),
    "k(k+1)": ("k(k+1)", "k^2+k", "(k+1)k", "k^2"),
    # intervals, sets, tuples, matrices
    "(1,2)": ("(1,2)", "(1, 2)", "[1,2]", "1<x<2", "\\left(1,2\\right)", "(2,1)"),
    "[0,\\infty)": ("[0,\\infty)", "[0, \\infty)", "x \\ge 0", "(0,\\infty)", "\\left[0,\\infty\\right)"),
    "(-\\infty,-1)\\cup(1,\\infty)": (
        "(-\\infty,-1)\\cup(1,\\infty)", "(-\\infty, -1) \\cup (1, \\infty)", "(1,\\infty)\\cup(-\\infty,-1)",
        "(1,\\infty)",
    ),
    "\\{1,2,3\\}": ("\\{1,2,3\\}", "\\{3,2,1\\}", "1,2,3", "1, 2, 3", "{1,2,3}", "\\{1,2\\}"),
    "1,-2": ("1,-2", "-2,1", "1 and -2", "1, -2", "1,2"),
    "(3, \\frac{\\pi}{2})": ("(3, \\frac{\\pi}{2})", "(3,\\frac{\\pi}{2})", "\\left(3, \\frac{\\pi}{2}\\right)",
                             "(3,1.5708)"),
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}": (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}", "\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}",
    ),
    "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}": (
        "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
        "\\begin{pmatrix} -\\frac{1}{3} \\\\ \\frac{2}{3} \\end{pmatrix}",
        "\\begin{pmatrix} \\frac13 \\\\ \\frac23 \\end{pmatrix}",
    ),
    "\\emptyset": ("\\emptyset", "\\varnothing", "\\{\\}", "0"),
    # units, words, money, degrees
    "5\\text{ cm}": ("5\\text{ cm}", "5 cm", "5", "5\\,\\text{cm}", "5 \\mathrm{~cm}", "50\\text{ mm}"),
    "10\\text{ square units}": ("10\\text{ square units}", "10", "10 square units", "10\\text{ units}^2"),
    "\\$18.90": ("\\$18.90", "18.90", "$18.90", "18.9", "\\$1890"),
    "90^\\circ": ("90^\\circ", "90", "90°", "90^{\\circ}", "90 degrees", "\\frac{\\pi}{2}"),
    "\\text{Monday}": ("\\text{Monday}", "Monday", "\\textbf{Monday}", "monday", "\\text{Tuesday}"),
    "\\text{(B)}": ("\\text{(B)}", "(B)", "B", "\\textbf{(B)}", "\\text{B}"),
    "Evelyn": ("Evelyn", "\\text{Evelyn}", "evelyn", "Evelyn."),
    "3\\text{ and }4": ("3\\text{ and }4", "3, 4", "3,4", "3 and 4"),
    "11:30": ("11:30", "11:30 a.m.", "11.30"),
    "6\\text{th}": ("6\\text{th}", "6", "6th", "6^{\\mathrm{th}}"),
    "\\overline{AB}": ("\\overline{AB}", "AB", "\\overline{BA}"),
    "0.\\overline{3}": ("0.\\overline{3}", "\\frac{1}{3}", "0.333...", "0.3"),
    # bases, unicode, long
    "2516_8": ("2516_8", "2516_{8}", "2516"),
    "½": ("½", "\\frac{1}{2}", "1/2", "0.5"),
    "²": ("²", "2", "^2"),
    "三": ("三", "3", "\\text{三}"),
    "√2": ("√2", "\\sqrt{2}", "√3"),
    "9876543210123456789": ("9876543210123456789", "9,876,543,210,123,456,789", "9876543210123456788"),
    "\\frac{1}{2}+\\frac{1}{3}": ("\\frac{1}{2}+\\frac{1}{3}", "\\frac{5}{6}", "5/6", "0.8333"),
    "a_{n}=3n-1": ("a_{n}=3n-1", "3n-1", "a_n=3n-1", "3n+1"),
    "\\boxed{8}": ("\\boxed{8}", "8", "\\boxed{\\boxed{8}}"),
    "an hour": ("an hour", "hour", "a hour"),
}  # fmt: skip

SAID = (
    "Answer: {}",
    "So we are done.\nAnswer: ${}$",
    "Therefore the final answer is \\boxed{{{}}}.",
    "First \\boxed{{1}}, but then \\boxed{{{}}}",
    "answer :  {}\n",
    "**Answer:** {}",
    "Answer: \\boxed{{{}}}",
    "Answer: 17\nI made a mistake.\nAnswer: $x = {}$.",
    "Answer: {}" + " and so on" * 40,  # beyond the last 300 characters
    "The final answer is: $\\boxed{{{}}}$. I hope it is correct.",
    "Let me think. $${}$$",
    "\\[ {} \\] Answer:",
    "<think>Answer: 3</think> ANSWER: {}\n\nDone",
    "The answer is {}",
)


def cases() -> list[tuple[str, str]]:
    """(response, truth). Each form is said in four of the ways in turn, every fourth truth in all of them."""
    found = []
    turn = 0
    for truth, forms in ANSWERS.items():
        for form in forms:
            ways = (
                SAID
                if form == truth and len(truth) % 4 == 0
                else [SAID[(turn + 5 * each) % len(SAID)] for each in range(4)]
            )
            found += [(way.format(form), truth) for way in ways]
            turn += 1
    return found
