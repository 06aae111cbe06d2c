# The extension's files and nothing else, for operators that mount extensions into a PostgreSQL 18 (extension_control_path):
#   docker build -f docker/image/extension.Dockerfile -t ulak-extension .
# /share/extension is where such operators look. The server's own image must have plpython3u, python3-pycurl and pg_cron.
ARG DEBIAN=debian:bookworm-slim
FROM ${DEBIAN} AS build
RUN apt-get update && apt-get install -y --no-install-recommends make python3 && rm -rf /var/lib/apt/lists/*
WORKDIR /ulak
COPY Makefile ./
COPY control control
COPY plpython plpython
COPY sql sql
RUN make build && mkdir -p /files/share/extension /files/licenses \
    && cp control/ulak.control build/ulak--*.sql /files/share/extension/
COPY LICENSE /files/licenses/ulak

FROM scratch
LABEL org.opencontainers.image.title="ulak" org.opencontainers.image.licenses="PostgreSQL"
COPY --from=build /files/ /
