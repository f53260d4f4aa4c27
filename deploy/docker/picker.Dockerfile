# The endpoint picker: `docker build -f deploy/docker/picker.Dockerfile -t REGISTRY/picker:0.1.0 .` from the repository's root.
# The base is pinned by its exact version. Pin its digest, too, where you mirror it: none is written here that was not pulled.
FROM docker.io/library/python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/picker.txt requirements/picker.txt
RUN pip install --require-hashes --only-binary :all: -r requirements/picker.txt
COPY pyproject.toml README.md ./
COPY epp epp
RUN pip install --no-deps --no-build-isolation .
# The command of the other package, which is not here; and what nobody needs who only runs.
RUN rm /opt/venv/bin/model-server && pip uninstall --yes setuptools pip

FROM docker.io/library/python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="prefix-gateway picker" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9002 9090
ENTRYPOINT ["epp"]
CMD ["--help"]
