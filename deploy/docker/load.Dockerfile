# The load generator: `docker build -f deploy/docker/load.Dockerfile .` from the repository's root. The Job of the chart runs it.
FROM docker.io/library/python:3.11.14-slim-bookworm
WORKDIR /app
COPY requirements/load.txt requirements/load.txt
RUN pip install --no-cache-dir --require-hashes -r requirements/load.txt
COPY tests/__init__.py tests/__init__.py
COPY tests/load tests/load
COPY tests/demo/__init__.py tests/demo/address.py tests/demo/
COPY tests/harness/__init__.py tests/harness/ports.py tests/harness/
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "tests.load"]
