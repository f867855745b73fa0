"""The prompts that engines are compared on when the user gives none: plain text, code, lists, other
scripts."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "Water boils at a temperature of",
    "The three most important ideas in physics are:\n1.",
    "Q: What is 12 times 7?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "To make a good cup of tea, first",
)
