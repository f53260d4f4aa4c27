"""Builds the images of deploy/docker with a real engine, buildah, for the tests, and keeps them in the cache
folder.

There is no daemon and no registry. The bases are made from Debian's packages, in place of the official Python
images.
"""
