"""The miniature world: procedural text, prompts and demonstrations for a recipe that fits on a laptop.

It replaces what a laptop cannot hold (web text, human annotators), but no part of the recipe. The world knows sums with
brackets and a few everyday things, in English and German. Its writers have good and bad habits: they reduce sums step
by step but often lose a ten, mix languages, answer prompts with a courtesy or badly, and refuse harmful requests or
not. A small model learns all of these habits, and the stages of the recipe have to bring out the good ones, guided only
by the rewards and the judge.
"""
