# Stands in for prom/prometheus where that cannot be pulled: Debian's package, with the same paths.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus wget \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner nobody --group nogroup /prometheus /etc/prometheus
USER nobody
VOLUME ["/prometheus"]
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["/usr/bin/prometheus"]
