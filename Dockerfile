# An image for CPUs. docs/serving.md shows how to run it; models are kept in the volume /models.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/foredraft
ENV PATH=/opt/foredraft/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements.lock ./
# torch's build for CPUs, then exactly the lock
RUN pip install --constraint requirements.lock --extra-index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.lock)" \
    && pip install --no-deps --requirement requirements.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN pip install --no-deps --no-build-isolation .

FROM python:3.12-slim
RUN useradd --create-home --uid 1000 foredraft && mkdir /models && chown foredraft /models
COPY --from=build /opt/foredraft /opt/foredraft
ENV PATH=/opt/foredraft/bin:$PATH XDG_CACHE_HOME=/models PYTHONUNBUFFERED=1
USER foredraft
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["foredraft", "serve", "--host", "0.0.0.0"]
CMD ["--model", "smollm2-135m", "--dtype", "int4"]
