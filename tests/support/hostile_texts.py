"""Strategies for what a model may write: pieces that parsers look for, repeated and mixed with any text."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = (
    *("<think>", "</think>", "<reasoning>", "</reasoning>", "<answer>", "</answer>", "\\boxed{", "\\text{", "\\frac{"),
    *("}", "{", "$", "$$", "\\(", "\\)", "\\[", "\\]", "(", ")", "[", "]", "\\", "\\\\", "`", "```", "```json\n", "**"),
    *(
        "42",
        "1,000",
        "0",
        "-",
        "+",
        "*",
        "/",
        "^",
        "=",
        "%",
        "\\%",
        ".",
        ",",
        ";",
        ":",
        "!",
        "?",
        "'",
        '"',
        "_",
        "&",
        "<",
    ),
    *(
        "\\neq ",
        "\\pm ",
        "\\in ",
        "\\le ",
        "\\infty",
        "\\sqrt",
        "\\sum_{n=1}^{3}",
        "\\int_0^1 ",
        "\\pi",
        "\\left",
        "\\right",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "x",
        "A",
        "B",
        "(B)",
        "the answer is ",
        "not ",
        "option ",
        "Das Ergebnis ist ",
    ),
    *(
        " ",
        "\n",
        "\t",
        "\n\n- ",
        "1. ",
        "\u200b",
        "\u3164",
        "\u2212",
        "²",
        "４",
        "٤",
        "½",
        "中",
        "カ",
        "答案是",
        "\ud800",
        "\0",
    ),
    *(
        '{"analysis": "x", "correctness": "correct"}',
        '{"',
        '": ',
        "<|im_end|>",
        "[INST]",
        "</s>",
        "</response>",
        "e9",
        "nan",
    ),
)

pieces = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.text(max_size=5),
        st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(2, 300)),
    ),
    max_size=12,
).map("".join)
"""A text of up to some thousand characters."""

completions = st.one_of(
    pieces,
    st.builds("<think>{}</think>{}".format, pieces, pieces),
    st.builds("<think>{}</think><answer>{}</answer>".format, pieces, pieces),
    st.builds("<think>{}</think>so \\boxed{{{}}}".format, pieces, pieces),
)
