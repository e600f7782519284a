# ruff: noqa: RUF001  (the characters are meant)
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError, MissingExtra, RewardError
from lockstep.judging import math
from lockstep.judging.math import compute_score, last_boxed

# (kind, same): pairs of an answer and a ground truth, graded by hand.
PAIRS = {
    ("integers and decimals", True): [
        ("42", "42"), ("42.", "42"), ("42.0", "42"), ("042", "42"), ("-7", "-7"), ("−7", "-7"), ("- 7", "-7"), ("1.50", "1.5"),
        (".5", "0.5"), ("+3", "3"), ("３", "3"),
    ],
    ("integers and decimals", False): [
        ("7", "-7"), ("4 2", "42"), ("1.05", "1.5"), ("10", "1"), ("100", "10"),
    ],
    ("thousands", True): [
        ("1,234", "1234"), ("1{,}234", "1234"), (r"1,\!234,\!567", "1234567"), (r"12\,345", "12345"), ("12 345", "12345"),
        ("1,234.5", "1234.5"), (r"\$1,234", "1234"), ("1,000, 2,000", "1000,2000"),
    ],
    ("thousands", False): [
        ("1,23", "123"), ("12,34", "1234"), ("(1,000)", "1000"),
    ],
    ("fractions", True): [
        (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\frac12"), (r"\tfrac{3}{4}", "3/4"), (r"\frac{2}{4}", r"\frac{1}{2}"),
        (r"\frac{-1}{2}", r"-\frac{1}{2}"), (r"\frac{1}{-2}", r"-\frac12"), ("-1/2", r"\frac{1}{-2}"), ("0.125", r"\frac18"),
        (r"3\frac{1}{2}", r"\frac{7}{2}"), ("3 1/2", "3.5"), (r"-2\frac13", r"-\frac73"), (r"0.\overline{3}", r"\frac13"),
        (r"0.1\overline{6}", r"\frac16"), (r"0.\overline{12}", r"\frac{4}{33}"), ("½", r"\frac12"),
    ],
    ("fractions", False): [
        (r"\frac{1}{2}", r"\frac{2}{1}"), ("0.33", r"\frac{1}{3}"), ("0.333333", r"\frac{1}{3}"), (r"3\frac12", r"\frac32"),
        ("31/2", r"3\frac12"), (r"0.\overline{3}", "0.3"), (r"\frac{1}{0}", "0"),
    ],
    ("powers, scientific, big", True): [
        ("2^{10}", "1024"), (r"1.5\times 10^{6}", "1500000"), (r"1.5 \cdot 10^6", r"1.5\times10^{6}"),
        (r"3\times10^{-2}", "0.03"), (r"2\cdot 2^{2004}", "2^{2005}"), ("5!", "120"), (r"\binom{5}{2}", "10"),
        ("10^{10}", "10000000000"), ("5.4e+01", "54"), ("1e5", "100000"), ("2e-03", "0.002"), ("2e+3", "3+2e"), (r"\text{2^{10}}", "1024"),
        ("1+e^{2x^4}", "e^{2x^4}+1"), ("2^{n^5+1}", r"2\cdot2^{n^5}"), (r"\frac{2005!}{2003!}", "4018020"),
    ],
    ("powers, scientific, big", False): [
        ("2^{2005}", "2^{2004}"), ("2e+3", "2000"), ("5.4e+01", "5.4"),
    ],
    ("roots", True): [
        (r"\sqrt{8}", r"2\sqrt{2}"), (r"2\sqrt2", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
        (r"\sqrt[3]{8}", "2"), (r"\sqrt[3]{4}", "4^{1/3}"), (r"\sqrt{16}", "4"), (r"\sqrt 3", r"\sqrt{3}"),
        ("sqrt(3)", r"\sqrt{3}"), ("√3", r"\sqrt{3}"), (r"2+\sqrt{3}", r"\sqrt{3}+2"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    ],
    ("roots", False): [
        (r"\sqrt{2}", "1.414"), (r"\sqrt{2}", "1.41421356"), (r"\sqrt{16}", r"\pm4"), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5}"),
    ],
    ("pi, e, logs, trig", True): [
        (r"2\pi", r"\pi\cdot 2"), (r"\frac{\pi}{2}", r"\frac{1}{2}\pi"), (r"0.5\pi", r"\frac{\pi}{2}"), ("2π", r"2\pi"),
        (r"\log_2 8", "3"), (r"\ln 4", r"2\ln 2"), (r"\log 100", "2"), ("e^{2}", "e^2"), (r"\sin 30^\circ", r"\frac12"),
        (r"\cos\frac{\pi}{3}", r"\frac12"), (r"\arctan 1", r"\frac{\pi}{4}"), (r"\tan^{-1} 1", r"\arctan 1"),
        (r"\sin^2 x", r"1-\cos^2 x"), (r"\sin 2x", r"2\sin x\cos x"),
        (r"\log 2+\log 3+\log 5+\log 7+\log 11", r"\log 2310"),
    ],
    ("pi, e, logs, trig", False): [
        (r"\pi", "3.14"), (r"\pi", r"\frac{22}{7}"), ("6.28", r"2\pi"), (r"\sin x", r"\cos x"),
    ],
    ("polynomials and expressions", True): [
        ("x^2+2x+1", "(x+1)^2"), ("(x+1)(x-2)", "(x-2)(x+1)"), ("2x + 3", "3+2x"), (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
        (r"\frac{1}{1-x}", r"-\frac{1}{x-1}"), ("ab", "ba"), (r"\frac{a}{b}c", r"\frac{ac}{b}"), (r"\sqrt{x^2}", "|x|"),
        ("x^{1/2}", r"\sqrt{x}"), ("a_1+a_2", "a_2+a_1"), (r"3\cdot2^n", r"6\cdot2^{n-1}"), ("-(q-p)", "p-q"),
        ("4x(x+2)", "4x^2+8x"), (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    ],
    ("polynomials and expressions", False): [
        ("x^2+2x+1", "x^2+2x-1"), ("xy", "x+y"), ("2n", "2m"), ("x", "X"), (r"\frac{a}{b}c", r"\frac{a}{b}"), ("|x|", "x"),
        (r"\sqrt{x^2}", "x"), ("a_1", "a_2"), ("k", "k+1"), ("x^4", "x^2"), ("p-q", "q-p"),
    ],
    ("complex", True): [
        ("3+4i", "4i+3"), ("i^2", "-1"), (r"\sqrt{-4}", "2i"), (r"\frac{1}{i}", "-i"), (r"e^{i\pi}", "-1"),
    ],
    ("complex", False): [
        ("3+4i", "3-4i"), ("2i", "2"),
    ],
    ("tuples, intervals, sets, lists", True): [
        ("(1,2)", "(1, 2)"), (r"\left(1,\,2\right)", "(1,2)"), ("[0,1)", "[0,1)"), (r"(\frac12,2)", "(0.5,2)"),
        (r"\left(\frac{2}{4},\sqrt{4}\right)", "(0.5,2)"), (r"\{1,2\}", r"\{2,1\}"), (r"\{1,2\}", "1,2"),
        (r"\left\{1,2\right\}", "2, 1"), ("{1,2}", r"\{1,2\}"), ("1, 2", "2 and 1"), (r"1 \text{ or } 2", "1,2"),
        (r"1, 2, \text{ and } 3", "3,2,1"), ("1,2,or 3", "1,2,3"), (r"\{5\}", "5"), ("x=1,2", "1,2"), ("x=1, x=2", "2,1"),
        (r"x = 1 \text{ or } x = 2", "1,2"), ("x_1=1, x_2=2", "1,2"), ("1;2", "1,2"), (r"1\pm\sqrt{2}", r"1+\sqrt{2},1-\sqrt{2}"),
        (r"\pm 3", "3,-3"), (r"x=\pm 2", "-2,2"), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1-\sqrt5}{2},\frac{1+\sqrt5}{2}"),
        (r"\pm1,\pm2", "1,2,-1,-2"), (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty)\cup(-\infty,2]"),
        ("(-inf, 2) U (3, inf)", r"(-\infty,2)\cup(3,\infty)"), (r"x\in(1,2)", "(1,2)"), (r"(-\infty,\infty)", r"\mathbb{R}"),
        (r"\text{all real numbers}", r"(-\infty,\infty)"), (r"\emptyset", r"\text{no solution}"), (r"\varnothing", r"\emptyset"),
        (r"\{\}", r"\emptyset"), (r"(1, \infty)", r"(1,+\infty)"), (r"x\ge2", r"[2,\infty)"), (r"2\le x", r"x \geq 2"),
        ("1<x<2", "(1,2)"), (r"1\le x<2", "[1,2)"), ("2>x>1", "1<x<2"), (r"x<1 \text{ or } x>3", r"(-\infty,1)\cup(3,\infty)"),
        (r"x\ne4", r"(-\infty,4)\cup(4,\infty)"), ("2x>4", "x>2"), (r"\{x \mid x>2\}", r"(2,\infty)"), ("x>=2", r"x\ge 2"),
    ],
    ("tuples, intervals, sets, lists", False): [
        ("(1,2)", "(2,1)"), ("(1,2)", r"\{1,2\}"), ("(1,2)", "[1,2]"), ("[1,2]", r"\{1,2\}"), ("(1,2)", "1,2"),
        ("(1,2]", "(1,2)"), ("[0,1)", "(0,1]"), ("(1,2,3)", "(1,2)"), (r"\{1,2\}", r"\{1,2,3\}"), ("1,2", "1"), ("1", "1,2"),
        ("1,1", "1"), (r"\pm3", "3"), ("3", r"\pm3"), (r"\pm1,\pm2", "1,2,-1"),
        (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2]\cup[3,\infty)"), (r"x\in[1,2]", "(1,2)"), (r"\infty", r"-\infty"),
        ("x>2", r"[2,\infty)"), ("x>2", "x<2"), ("x>2", "x>3"), ("x>2", "y>2"), (r"x \le 5", "5"),
    ],
    ("equations", True): [
        ("x=5", "5"), ("5", "x=5"), ("y=2x+3", "2x+3"), ("y=2x+3", "y=3+2x"), ("y=2x+3", "2x-y+3=0"), ("2x+y=4", "4x+2y=8"),
        ("x^2+y^2=25", "y^2+x^2-25=0"), ("f(x)=x+1", "x+1"), ("f(2)=7", "7"), ("x^2+y^2=25", "25"), (r"\frac{10}{2}=5", "5"),
        ("x=2+3=5", "5"), (r"\text{Area}=12", "12"), ("AB=5", "5"), (r"\angle ABC=30^\circ", "30"), ("(x,y)=(1,2)", "(1,2)"),
        ("x=1,y=2", "(1,2)"), ("y=2,x=1", "(1,2)"), ("x=1, y=2", "y=2, x=1"), (r"\pi\approx3.14", r"\pi"),
        (r"x\approx3.14", "3.14"),
    ],
    ("equations", False): [
        ("x=5", "x=6"), ("x=5", "y=5"), ("2x+y=4", "2x+y=5"), ("2x=5", "5"), ("5", "2x=5"), ("25", "x^2+y^2=25"),
        ("x=2,y=1", "(1,2)"),
    ],
    ("matrices", True): [
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix}0.5\\2\end{pmatrix}", r"\begin{pmatrix}\frac12\\2\end{pmatrix}"),
        (r"\frac12\begin{pmatrix}2\\4\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix}-1/3\\2\end{pmatrix}", r"\begin{pmatrix}-\frac{1}{3}\\2\end{pmatrix}"),
        (r"\langle1,2\rangle", r"\langle 1, 2\rangle"),
    ],
    ("matrices", False): [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ],
    ("units, degrees, percent, currency", True): [
        (r"5\text{ cm}", "5"), (r"5 \text{ cm}^2", "5"), ("5 cm", "5"), ("5cm", r"5\text{ cm}"),
        (r"5\text{ cm}", r"5\text{ centimeters}"), (r"5\text{ square inches}", r"5\text{ in}^2"), ("18 apples", "18"),
        (r"\text{18 apples}", "18"), (r"12\text{ square units}", "12"), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"),
        (r"90^\circ", "90"), (r"90^{\circ}", r"90\text{ degrees}"), ("90°", "90"), ("90 degrees", r"90^\circ"), (r"50\%", "50"),
        ("50%", r"50\%"), ("50", r"50\%"), ("0.5", r"50\%"), (r"50\%", r"\frac12"), ("50 percent", r"50\%"), (r"\$5", "5"),
        (r"\$5.00", r"5\text{ dollars}"), (r"5:30\text{ p.m.}", r"5:30\text{ pm}"), (r"10\text{ miles per hour}", "10"),
        ("10 mph", "10"),
    ],
    ("units, degrees, percent, currency", False): [
        (r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ cm}", r"5\text{ cm}^2"), (r"5\text{ inches}", r"5\text{ feet}"),
        (r"45^\circ", r"90^\circ"), ("5", r"50\%"), ("0.05", r"50\%"), (r"\$5", r"5\text{ cents}"),
        (r"5:30\text{ a.m.}", r"5:30\text{ p.m.}"),
    ],
    ("text", True): [
        (r"\text{Evelyn}", "Evelyn"), (r"\text{Evelyn}", r"\text{evelyn}"), (r"\text{(A)}", "A"), ("(A)", r"\text{A}"),
        (r"\textbf{(C)}", r"\text{(C)}"), (r"\text{yes}", "Yes"), (r"\text{even}", "even"), (r"\mathrm{odd}", r"\text{odd}"),
        (r"\text{A and B}", "A, B"), (r"\text{(B), (C)}", "C,B"), (r"\text{June 20}", "June 20"),
    ],
    ("text", False): [
        (r"\text{Evelyn}", r"\text{Briana}"), ("A", "B"), (r"\text{(A)}", r"\text{(B)}"), ("yes", "no"), ("A,B", "A"),
        (r"\text{red}", "5"), ("5", r"\text{red}"), (r"\text{June 20}", r"\text{June 21}"),
    ],
    ("bases, ratios", True): [
        ("1101_2", "1101_{2}"), ("1101_2", r"1101_{\text{two}}"), ("12_{10}", "12_10"), ("3:2", "3:2"), ("3:2", r"\frac32"),
        ("6:4", "3:2"), ("1:2:3", "1:2:3"),
    ],
    ("bases, ratios", False): [
        ("1101_2", "1101"), ("1101_2", "13"), ("1101_2", "1101_3"), ("3:2", "2:3"), ("1:2:3", r"\frac16"), (r"5:30\text{ pm}", r"\frac16"),
        ("1:2:3", "3:2:1"),
    ],
    ("empty, nothing", False): [
        ("", "5"), (" ", "5"), (r"\text{}", "5"), ("?", "5"), (r"\,", "0"), ("{}", "0"), (",", "1,2"),
    ],
    ("as models write them", True): [
        (r"\log_2 8", "3"), (r"\pi\approx3.14", r"\pi"), (r"\text{June 20}", "June 20"), (r"12\,\text{cm}^2", "12"),
        (r"12 \mathrm{~cm}^2", "12"), (r"12~\mathrm{cm}^{2}", r"12\text{ cm}^2"), (r"2\,\mathrm{m/s}", "2"), (r"\text{\$}5", "5"),
        (r"5 \, \text{\%}", r"5\%"), (r"\mathbf{5}", "5"), (r"\boldsymbol{x+1}", "1+x"), (r"\bf 5", "5"), (r"{\bf 5}", "5"),
        (r"\frac{3}{4}\sqrt{3}", r"\frac{3\sqrt{3}}{4}"), (r"-2\le x\le7", "[-2,7]"), (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
        ("9x^2+4y^2=36", r"\frac{x^2}{4}+\frac{y^2}{9}=1"), ("(x+2)^2=0", "x^2+4x+4=0"),
        (r"e^{\pi i/3}", r"\frac12+\frac{\sqrt3}{2}i"), (r"45^\circ, 135^\circ", "135,45"), (r"(2,45^\circ)", "(2,45)"),
        (r"\text{0 or 1}", "0,1"), (r"x=3 \text{ and } y=4", "(3,4)"), ("a=1,b=2,c=3", "(1,2,3)"), ("a=1,b=2,c=3", "1,2,3"),
        (r"33\frac{1}{3}\%", r"\frac{100}{3}"), (r"y=\frac{x+7}{4}", "-x+4y=7"), (r"7.0\times10^{3}", "7000"),
        (r"\text{No solution}", r"\text{no solution}"), (r"\cos\theta+i\sin\theta", r"e^{i\theta}"),
        (r"\left\lfloor\frac{n}{2}\right\rfloor", r"\lfloor n/2\rfloor"), ("(x-1)(x+2)", "x^2+x-2"),
        (r"\frac{5}{2}\text{ hours}", "2.5"), (r"\text{5}", "5"), (r"\text{x = 5}", "5"), (r"5\ \text{units}", "5"),
        (r"\overline{AB}", r"\overline{AB}"), (r"\sqrt{x}+1", "1+x^{0.5}"), (r"\sin^{-1}(x)", r"\arcsin x"),
        (r"1+\frac{1}{2}", r"1\frac{1}{2}"), (r"\frac{\frac{1}{2}}{3}", r"\frac16"), (r"\frac{2\cdot 3}{4}", "1.5"),
        (r"\left|x-1\right|", "|1-x|"), ("(2x)^3", "8x^3"), ("2(3)", "6"), ("a^{-1}", r"\frac1a"), ("x^{2}y^{3}", "x^2 y^3"),
        (r"\frac{y^2}{x}", "y^2x^{-1}"), ("5,6", "6,5"), ("0.5,0.25", r"\frac14,\frac12"), (r"\infty", "infinity"),
        (r"+\infty", r"\infty"), (r"-\infty", "-infinity"), (r"\text{infinity}", r"\infty"), ("x^2", "x^{2}"), ("x^{10}", "x^10"),
        ("x_{1}", "x_1"), (r"\theta", r"\theta"), ("30π", r"30\pi"), (r"30\pi\text{ cm}^3", r"30\pi"), (r"2\pi r", r"2r\pi"),
        (r"\pi r^2", r"\pi r^{2}"), ("0.25", r"25\%"), (r"100\%", "1"), (r"1\%", "1"), ("0", r"0\%"),
        (r"\frac{m+n}{2}", "0.5(m+n)"), ("1-x", "1 - x"), (r"\{-1,0,1\}", "-1,0,1"), (r"\{x\mid -1<x<1\}", "(-1,1)"),
        (r"\{x: x\ge 0\}", r"[0,\infty)"), (r"8 \text{ and } 9", "8,9"), ("8-9", "-1"), (r"\$3.50", "3.5"),
        ("3.50 dollars", "3.5"), ("12:30", "12:30"), ("y-1=3(x-2)", "y=3x-5"), ("x+y=5", "y=5-x"), ("x=y", "y=x"),
        ("x = 2 + 3", "5"), (r"r=2\cos\theta", r"2\cos\theta"), (r"P(A)=\frac12", "0.5"), (r"\theta=30^\circ", "30"),
        (r"\frac{\pi}{6}, \frac{5\pi}{6}", r"\frac{5\pi}{6},\frac{\pi}{6}"), ("(1+i)(1-i)", "2"),
        (r"\frac{6}{8}", r"\frac{9}{12}"), (r"\sqrt{50}", r"5\sqrt{2}"), (r"\frac{10}{\sqrt{5}}", r"2\sqrt5"),
        (r"\begin{pmatrix}x+1\\2\end{pmatrix}", r"\begin{pmatrix}1+x\\2\end{pmatrix}"),
        (r"\left(\begin{array}{c}1\\2\end{array}\right)", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("Monday", r"\text{Monday}"),
        (r"\text{Alice, Bob}", "Bob and Alice"), ("ellipse", r"\text{Ellipse}"), (r"\textbf{A}", "A"), ("(B)", "B"), ("B.", "B"),
        ("ABC", "ABC"), (r"2\cdot3\cdot5", "30"), (r"2^3\cdot3", "24"), ("a=5", "5"), ("a+b=5", "5"), ("5=x", "x=5"),
        ("5=x", "5"), (r"x\in\{1,2\}", "1,2"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), ("n!", "n(n-1)!"),
    ],
    ("as models write them", False): [
        ("(0,0),(1,1)", "(0,0)"), (r"\text{undefined}", r"\text{DNE}"), (r"[4,\infty)", r"[4,\infty]"), ("x^2+1", "y^2+1"),
        (r"5\text{ hours}", r"5\text{ minutes}"), ("3x-1", "3x+1"), ("3-2x", "2x-3"), ("5,6", "56"), ("56", "5,6"),
        ("(5,6)", "56"), (r"\frac{1}{2},\frac{1}{4}", "1/2"), ("2,2", "2"), (r"\text{infinitely many}", r"\infty"),
        (r"\theta", r"\alpha"), (r"\frac{1}{3}", r"33.3\%"), (r"0.333\ldots", r"\frac13"), (r"\frac{m+n}{2}", r"\frac{m}{2}+n"),
        (r"8\text{ to }9", "8,9"), ("8-9", "8,9"), (r"350\text{ cents}", r"\$3.50"), ("12:30", "12:31"), ("five", "5"),
        ("y=3x-5", "y=3x+5"), ("x=2", "x=-2"), (r"\tan x=\frac12", "0.5"), ("m=2, b=3", "(2,3)"), (r"\sqrt{5}-1", r"1-\sqrt5"),
        ("1/3", "0.3333333333333333"), (r"\begin{cases}x=1\\y=2\end{cases}", "(1,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), ("on Monday", r"\text{Monday}"),
        (r"\text{hyperbola}", r"\text{parabola}"), (r"\text{B}", "b"), ("ABC", "ABD"), (r"\frac{1}{x+1}", r"\frac{1}{x}+1"),
        (r"\sqrt{x+1}", r"\sqrt{x}+1"), ("2^{x+1}", "2^x+1"),
    ],
    ("not quite five", True): [
        ("((5))", "5"), ("5(1)", "5"), ("|5|", "5"), ("|-5|", "5"), (r"\lfloor5.5\rfloor", "5"), ("--5", "5"),
    ],
    ("not quite five", False): [
        ("5#", "5"), ("5?", "5"), (r"5\foo", "5"), ("5|6", "5"), (r"5\mid 10", "5"), ("5'", "4'"), ("5>", "5"), ("(5", "5"),
        ("5/", "5"), ("5+", "5"), (r"\text{at least }5", "5"), (r"5\text{ or more}", "5"), ("> 5", "5"), (r"5\ldots", "5"),
        ("5 5", "5"), ("5i", "5"), ("5x", "5"), (r"\text{no }5", "5"), (r"5\to6", "5"), ("5_3", "5"),
    ],
}  # fmt: skip


def test_the_pairs_are_many():
    assert sum(map(len, PAIRS.values())) > 400


@pytest.mark.parametrize(("kind", "same"), PAIRS)
def test_an_answer_scores_as_a_person_would_grade_it(kind, same):
    wrong = [
        (answer, truth) for answer, truth in PAIRS[kind, same] if compute_score(rf"So \boxed{{{answer}}}.", truth) != float(same)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done }", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x > 0\right.}", r"\left\{x \mid x > 0\right."),
        (r"\boxed{\text{it is } \boxed{7}}", "7"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed{ 6 }", " 6 "),
        (r"\boxed" + "\n{8}", "8"),
        (r"\boxed{3} and \boxedness{4}", "3"),
        (r"\boxed{3} and \boxed{9", None),
        (r"\boxed", None),
        ("5", None),
    ],
)
def test_the_last_box_is_found_with_its_nested_braces(text, content):
    assert last_boxed(text) == content


def test_without_a_box_there_is_no_score():
    assert compute_score("the answer is 5", "5") == 0.0


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=r"\frac{sqt}12 .,=/-$%texbo^[]()<|:&", max_size=40))
def test_any_answer_is_the_same_as_itself(text):
    if text.strip() and last_boxed(rf"\boxed{{{text}}}") == text:
        assert compute_score(rf"\boxed{{{text}}}", f" {text}\n") == 1.0


def test_an_answer_of_thousands_of_characters_is_compared_as_it_is_written():
    long = "1+" * 1500 + "1"
    assert compute_score(rf"\boxed{{{long}}}", long) == 1.0
    assert compute_score(rf"\boxed{{{long}}}", "1501") == 0.0


def test_algebra_that_does_not_end_is_a_missing_reward_and_the_next_row_is_scored():
    with pytest.raises(RewardError, match="within 0.5 s"):
        compute_score(r"\boxed{\int_0^\infty e^{-x^2}\sin(x^x)dx}", r"\sqrt{5}", timeout_s=0.5)
    assert compute_score(r"\boxed{\frac{5}{\sqrt{5}}}", r"\sqrt{5}") == 1.0


def test_most_rows_need_no_algebra(monkeypatch):
    def no_algebra(*_):
        raise AssertionError

    monkeypatch.setattr(math, "_is_same_by_algebra", no_algebra)
    for answer, truth, score in [
        ("42", "42", 1),
        ("41", "42", 0),
        (r"\frac12", "0.5", 1),
        ("(1,2)", "(2,1)", 0),
        ("x+1", "x + 1", 1),
        ("yes", "no", 0),
    ]:
        assert compute_score(rf"\boxed{{{answer}}}", truth) == score


def test_without_math_verify_the_rule_refuses(monkeypatch):
    monkeypatch.setattr(math, "_has_math_verify", lambda: False)
    with pytest.raises(MissingExtra, match=r"pip install 'lockstep-rl\[math\]'"):
        compute_score(r"\boxed{5}", "5")


@pytest.mark.parametrize("truth", [None, "", " ", ["5"], True])
def test_a_missing_ground_truth_is_an_error(truth):
    with pytest.raises(DataError, match="ground_truth"):
        compute_score(r"\boxed{5}", truth)
