# The load generator: `docker build -f deploy/docker/load.Dockerfile .` from the repository's root. The Job of the chart runs it.
ARG BUILD_BASE=docker.io/library/python:3.11.14-bookworm
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BUILD_BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/load.txt requirements/load.txt
RUN pip install --no-compile --require-hashes -r requirements/load.txt
# Compiles to bytecode only the modules that a load test imports.
RUN python -I -c 'import locust.main, msgspec, yaml'
# Removes files that are not needed to run.
RUN pip uninstall --yes setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="prefix-gateway load generator" org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /app
COPY --from=build /opt/venv /opt/venv
COPY tests/__init__.py tests/__init__.py
COPY bench/__init__.py bench/__init__.py
COPY bench/load bench/load
COPY bench/demo/__init__.py bench/demo/address.py bench/demo/
COPY tests/harness/__init__.py tests/harness/ports.py tests/harness/
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "bench.load"]
