"""Generated input at every entry of the picker. Errors are typed, the picker's state stays valid, and its
memory does not grow.

`test_fuzz` and `listening` list the entries, `mutating` makes inputs from valid examples, and `run` feeds
and checks them. CI feeds four million bytes to each entry (`test_fuzz.py`). `PREFIX_GATEWAY_FUZZ_SEED=7 make
fuzz ARGS="-k policy_file"` goes on for longer. An input that once failed is kept in `seeds/<entry>/` and is
fed first from then on.
"""
