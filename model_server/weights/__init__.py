"""Where models' files come from: a folder somebody names, or a small model fetched and converted once.
No torch on import.
"""
