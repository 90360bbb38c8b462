# Two images: docker build --target cpu -t quire:cpu .     docker build --target gpu -t quire:gpu .
# Layers, from what changes least to what changes most: Python, torch, the other packages, Quire. docs/how-to/containers.md tells more.
#   PYTHON_IMAGE      Python 3.11 or newer with venv, on Debian
#   CPU_TORCH_INDEX   where torch without CUDA is: PyPI's build for x86-64 brings all of CUDA
#   GPU_TORCH_INDEX   https://download.pytorch.org/whl/cu126, say, for drivers older than PyPI's build wants
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS python
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1

# /opt/quire is the environment that is copied as it is; /opt/pip has the pip that fills it, and stays behind
FROM python AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/quire
COPY pyproject.toml constraints.txt ./

# torch alone from its index, what it needs from PyPI
FROM build AS torch-cpu
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/pip/bin/pip --python /opt/quire/bin/python install --no-deps --index-url "$CPU_TORCH_INDEX" -c constraints.txt torch \
    && /opt/pip/bin/pip --python /opt/quire/bin/python install -c constraints.txt torch \
    && /opt/quire/bin/python -c 'import torch; assert torch.version.cuda is None, "this torch is built for CUDA"'

FROM build AS torch-gpu
ARG GPU_TORCH_INDEX=https://pypi.org/simple
RUN /opt/pip/bin/pip --python /opt/quire/bin/python install --no-deps --index-url "$GPU_TORCH_INDEX" -c constraints.txt torch \
    && /opt/pip/bin/pip --python /opt/quire/bin/python install -c constraints.txt torch \
    && /opt/quire/bin/python -c 'import torch; assert torch.version.cuda is not None, "this torch is built without CUDA"'

# what pyproject.toml asks for and is not there yet: /packages has nothing of torch's layer
FROM torch-cpu AS packages-cpu
COPY deploy/docker/requirements.py deploy/docker/
RUN /opt/quire/bin/python deploy/docker/requirements.py otel zmq > requirements.txt \
    && /opt/pip/bin/pip --python /opt/quire/bin/python install --prefix /packages -c constraints.txt -r requirements.txt

FROM torch-gpu AS packages-gpu
COPY deploy/docker/requirements.py deploy/docker/
RUN /opt/quire/bin/python deploy/docker/requirements.py otel zmq > requirements.txt \
    && /opt/pip/bin/pip --python /opt/quire/bin/python install --prefix /packages -c constraints.txt -r requirements.txt

FROM build AS quire
COPY README.md LICENSE quire.py ./
COPY kernels kernels
COPY models models
COPY engine engine
COPY server server
COPY benchmarks benchmarks
RUN /opt/pip/bin/pip --python /opt/quire/bin/python install --no-deps --prefix /quire .

# Nothing here is written to at run time: the root may be read-only. /var/cache/quire keeps downloads and compiled kernels.
FROM python AS runtime
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --home-dir /var/cache/quire --shell /usr/sbin/nologin quire \
    && install -d -o quire -g quire /var/cache/quire \
    && install -d /models
ENV HOME=/var/cache/quire HF_HOME=/var/cache/quire/huggingface TRITON_CACHE_DIR=/var/cache/quire/triton PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.title="Quire" \
    org.opencontainers.image.description="An OpenAI-compatible server for large language models" \
    org.opencontainers.image.licenses="Apache-2.0"
COPY deploy/docker/healthcheck.py /usr/local/bin/quire-healthcheck
VOLUME /var/cache/quire
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# ready, not only alive, wherever the server says it listens; a large model may take its time
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=3 CMD ["/opt/quire/bin/python", "/usr/local/bin/quire-healthcheck"]
# without QUIRE_API_KEY, QUIRE_API_KEY_FILE or QUIRE_ALLOW_ANONYMOUS=true it refuses to start
ENTRYPOINT ["/opt/quire/bin/quire", "serve", "--host", "0.0.0.0"]

# Triton builds a launcher for each kernel with a C compiler; CUDA itself comes with torch, the driver from the host
FROM runtime AS gpu
USER 0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=torch-gpu /opt/quire /opt/quire
COPY --from=packages-gpu /packages /opt/quire
COPY --from=quire /quire /opt/quire
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION
USER 10001:10001

# the last is what `docker build .` makes
FROM runtime AS cpu
COPY --from=torch-cpu /opt/quire /opt/quire
COPY --from=packages-cpu /packages /opt/quire
COPY --from=quire /quire /opt/quire
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION
