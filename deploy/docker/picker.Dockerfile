# The endpoint picker: `docker build -f deploy/docker/picker.Dockerfile -t REGISTRY/picker:VERSION .` from the repository's root,
# or `make images push REGISTRY=...`, which needs no Docker. Both bases must have Python 3.11 at the same path and the same C library;
# only the first needs a compiler. If you mirror the bases, pin their digests too. Digests are missing here, because these images were
# not pulled.
ARG BUILD_BASE=docker.io/library/python:3.11.14-bookworm
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BUILD_BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/picker.txt requirements/picker.txt
RUN pip install --no-compile --require-hashes --only-binary :all: -r requirements/picker.txt
COPY pyproject.toml README.md ./
COPY epp epp
RUN pip install --no-compile --no-deps --no-build-isolation .
# Imports all modules of epp except those of `epp replay`, whose simulated servers are not in this image. So only these modules, and the modules
# that they import, are compiled to bytecode. Bytecode of all modules would be half of the packages' size.
RUN python -I -c 'import importlib, pkgutil, epp; [importlib.import_module(m.name) for m in pkgutil.walk_packages(epp.__path__, "epp.") if not m.name.endswith("__main__") and not m.name.startswith("epp.tools.replay.")]'
# Removes the command of the other package, which is not in this image, and files that are not needed to run.
RUN rm /opt/venv/bin/model-server && pip uninstall --yes setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="prefix-gateway picker" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9002 9090
ENTRYPOINT ["epp"]
CMD ["--help"]
