# quire on CPUs. Build and run:
#
#     docker build --tag quire .
#     docker run --rm --publish 8000:8000 quire                                     the bundled model
#     docker run --rm --publish 8000:8000 --volume quire-cache:/cache \
#         --cpus 4 --stop-timeout 45 \
#         --env QUIRE_API_KEY quire facebook/opt-125m --max-num-seqs 32             one of the hub's
#
# Arguments are those of `quire serve`; each option is a QUIRE_* variable too. Without QUIRE_API_KEY everybody who
# reaches the port may use it. Give the container longer to stop (--stop-timeout) than requests get (--shutdown-timeout,
# 30 seconds), or they are cut off.

ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS builder

# cmake and ninja come with the build backend, from PyPI.
# Not pinned: Debian's mirrors keep a package's newest version only, so a pinned one is gone after the next security
# update. The base image's tag holds Debian's release, and with it the compiler's.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH

# By itself and first: it is most of the image, and changes least. PyPI's torch would bring gigabytes of CUDA packages.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --constraint constraints.txt torch

COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY quire quire
# Where the kernels cannot be compiled, the package is built without them, and would be slow: here that is an error.
# (-I: the installed package is looked at, not the one in this folder, which has no kernels.)
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && pip install --no-cache-dir --constraint constraints.txt /wheels/*.whl \
 && pip check \
 && python -I -c "import quire.kernels._C"


FROM python:${PYTHON}

# Numbers, so that Kubernetes can see that this is not root.
RUN groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin quire \
 && install --directory --owner=10001 --group=10001 /cache

# The kernels need libstdc++ and libgcc, which every Debian has; libgomp comes with torch.
COPY --from=builder /opt/quire /opt/quire

# As variables, so that arguments after the image's name leave them as they are.
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache \
    HF_HUB_DISABLE_TELEMETRY=1 \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_LOG_FORMAT=json

USER 10001:10001
WORKDIR /home/quire
VOLUME ["/cache"]
EXPOSE 8000

# The port is QUIRE_PORT's: who gives --port instead, or TLS, turns this off with --no-healthcheck. No proxy is asked.
# In the first ten minutes a model may still be on its way from the hub.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('QUIRE_PORT', '8000') + '/health', timeout=4)"]

ENTRYPOINT ["quire", "serve"]
