# The model server without a model, and the LoRA syncer:
# `docker build -f deploy/docker/model-server.Dockerfile -t REGISTRY/model-server:VERSION .` from the repository's root,
# or `make images push REGISTRY=...`, which needs no Docker. Both bases must have Python 3.11 at the same path and the same C library.
# If you mirror the bases, pin their digests too. Digests are missing here, because these images were not pulled.
ARG BUILD_BASE=docker.io/library/python:3.11.14-bookworm
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BUILD_BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/model-server.txt requirements/model-server.txt
RUN pip install --no-compile --require-hashes --only-binary :all: -r requirements/model-server.txt
COPY pyproject.toml README.md ./
COPY model_server model_server
# The C extensions are the picker's. This image holds no file of the picker.
RUN sed -i '/^\[\[tool.setuptools.ext-modules/,/^$/d' pyproject.toml
RUN pip install --no-compile --no-deps --no-build-isolation .
# Compiles to bytecode only the modules that the command imports. Bytecode of all modules would be half of the packages' size.
RUN model-server serve --help >/dev/null && model-server lora-sync --help >/dev/null && python -I -m compileall -q /opt/venv/lib/python3.11/site-packages/model_server
# Removes the command of the other package, which is not in this image, and files that are not needed to run.
RUN rm /opt/venv/bin/epp && pip uninstall --yes setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="prefix-gateway model server" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000 5557 5558
ENTRYPOINT ["model-server"]
CMD ["--help"]
