"""Generated input at every entry of the picker:
what comes out are typed errors, its state stays sound, and nothing grows.

`entries` and `listening` say what the entries are, `mutating` makes the input from valid examples, `run`
feeds it and checks. CI feeds about a million bytes to each entry (`test_fuzz.py`);
`make fuzz ARGS="--entry policy --megabytes 100 --seed 7"` goes on for longer. An input that once failed is
kept in `seeds/<entry>/` and is fed first from then on.
"""
