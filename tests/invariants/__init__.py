"""What holds of the picker's state between any two calls, one module for each part of `epp`.

A function `check_<part>(part)` asserts every invariant of a part and of the parts that it owns, in private
fields, too. The property machines, the fuzz targets and the scenarios call these functions after each step.
"""
