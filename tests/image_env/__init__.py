"""Builds the images of deploy/docker with a real engine, buildah, for the tests,
and keeps them in the cache folder.

No daemon and no registry: the bases are made from Debian's packages,
and stand in for the official Python images.
"""
