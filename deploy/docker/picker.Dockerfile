# The endpoint picker: `docker build -f deploy/docker/picker.Dockerfile -t REGISTRY/picker:0.1.0 .` from the repository's root,
# or `make images push REGISTRY=...`, which needs no Docker. Both bases must have Python 3.11 at the same path and the same C library;
# only the first needs a compiler. Pin their digests, too, where you mirror them: none is written here that was not pulled.
ARG BUILD_BASE=docker.io/library/python:3.11.14-bookworm
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BUILD_BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/picker.txt requirements/picker.txt
RUN pip install --no-compile --require-hashes --only-binary :all: -r requirements/picker.txt
# What compiles the hot path goes beside the environment, since nobody needs it who only runs.
COPY requirements/compile.txt requirements/compile.txt
RUN pip install --no-compile --require-hashes --only-binary :all: --target /opt/compile -r requirements/compile.txt
COPY pyproject.toml setup.py README.md ./
COPY epp epp
# Without its C extensions the picker would be slow: then the build fails.
RUN pip install --no-compile --no-deps --no-build-isolation . && python -I -c 'import epp.request._jsontext, epp.extproc._wire, epp.prefix_index._chain'
# Again, with the hot path as machine code: a tenth to a fifth of the CPU less (docs/decisions/0008-the-image-is-compiled.md).
RUN PYTHONPATH=/opt/compile PREFIX_GATEWAY_COMPILE=1 pip install --no-compile --no-deps --no-build-isolation --force-reinstall . \
 && python -I -c 'import sys, epp.process; sys.exit(not epp.process.compiled())'
# Bytecode of what the picker imports, and of nothing else: half of the size of the packages would be bytecode.
# Bytecode of all but `epp replay`, whose simulated servers are not in this image.
RUN python -I -c 'import importlib, pkgutil, epp; [importlib.import_module(m.name) for m in pkgutil.walk_packages(epp.__path__, "epp.") if not m.name.endswith("__main__") and not m.name.startswith("epp.replay.")]'
# The command of the other package, which is not here; and what nobody needs who only runs.
RUN rm /opt/venv/bin/model-server && pip uninstall --yes setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="prefix-gateway picker" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9002 9090
ENTRYPOINT ["epp"]
CMD ["--help"]
